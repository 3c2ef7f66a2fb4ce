"""The page: one file, and its numbers are those that a person computes from shapes and plan."""

import json
import re

import pytest
import torch
from torch.nn import functional

import mgpu_core
from mgpu_core import _core, comm
from mgpu_core.support.tables import human_nbytes
from mgpu_core.tools.cli import main
from mgpu_core.tools.explain import page

SIMPLENET = {"hidden.weight": 784 * 128, "hidden.bias": 128, "output.weight": 128 * 10, "output.bias": 10}


def data_of(path):
    text = path.read_text()
    assert len(text.encode()) < 1_000_000
    (trace,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', text, re.DOTALL)
    return json.loads(trace)


def scenes(step, kind):
    return [scene for scene in step["scenes"] if scene["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "batch"), [(4, 64), (3, 50)])
def test_mnist_as_computed_by_hand(tmp_path, ranks, batch):
    """Row counts, bytes and sums of ``mgpu mnist --explain``, from shapes and plan."""
    arguments = ["--device-ids", ",".join(["cpu"] * ranks), "--epochs", "1", "--batch", str(batch)]
    assert main(["mnist", *arguments, "--explain", str(tmp_path / "out.html")]) == 0
    trace = data_of(tmp_path / "out.html")
    assert [step["name"] for step in trace["steps"]] == ["train_step"] * 3
    counts = [batch // ranks + (rank < batch % ranks) for rank in range(ranks)]
    assert counts == [count for _, count in _core.chunk_plan(batch, ranks)]
    sizes = {name: 4 * count for name, count in SIMPLENET.items()}
    for step in trace["steps"]:
        (scatter,) = scenes(step, "scatter")
        assert scatter["counts"] == counts
        images, labels = scatter["tensors"]
        assert (images["name"], labels["name"]) == ("inputs[0]", "target")
        assert images["nbytes"] == [count * 784 * 4 for count in counts]
        assert labels["nbytes"] == [count * 8 for count in counts]
        assert images["shapes"] == [[count, 1, 28, 28] for count in counts]
        assert {images["route"], labels["route"]} == {"view"}

        for kind in ("forward", "loss", "backward"):
            (scene,) = scenes(step, kind)
            assert sorted(each["rank"] for each in scene["ranks"]) == list(range(ranks))

        (bucket,) = step["buckets"]  # 407,080 bytes go together
        assert dict(zip(bucket["names"], bucket["nbytes"], strict=True)) == sizes
        (reduction,) = scenes(step, "round")
        assert reduction["operation"] == "reduce"
        assert reduction["nbytes"] == [sum(sizes.values())] * ranks
        (arrow,) = reduction["arrows"]
        assert (arrow["sums"], arrow["from"], arrow["to"]) == (True, list(range(ranks)), [-1])
        assert (arrow["hops"], arrow["nbytes"]) == (4, sum(sizes.values()))
        assert reduction["moved"] == ranks * sum(sizes.values())
        assert len(scenes(step, "update")) == 1
        head, *rows = step["table"]
        moved = {row[0]: row[head.index("moved")] for row in rows}
        assert (moved["scatter"], moved["all_reduce"]) == ("-", human_nbytes(ranks * sum(sizes.values())))


@pytest.mark.several_ranks
def test_a_ring_round_by_round(tmp_path, ranks):
    count = ranks * 5
    with mgpu_core.explain() as trace:
        comm.all_reduce([torch.ones(count) for _ in range(ranks)], algorithm="ring")
    trace.save_html(tmp_path / "ring.html")
    (step,) = data_of(tmp_path / "ring.html")["steps"]
    rounds = scenes(step, "round")
    assert [scene["round"] for scene in rounds] == list(range(2 * (ranks - 1)))
    schedule = _core.ring_schedule(ranks)
    for scene, hops in zip(rounds, schedule, strict=True):
        assert len(scene["arrows"]) == ranks
        found = {(arrow["to"][0], arrow["offset"] // 20, arrow["sums"]) for arrow in scene["arrows"]}
        assert found == {(to, chunk, reduce) for _, to, chunk, reduce in hops}
        assert {(arrow["nbytes"], arrow["whole"]) for arrow in scene["arrows"]} == {(20, count * 4)}


def test_a_forward_and_its_backward(tmp_path):
    module = torch.nn.Linear(5, 3)
    model = mgpu_core.DataParallel(module, ["cpu"] * 3)
    x = torch.randn(7, 5)
    with mgpu_core.explain() as trace:
        functional.cross_entropy(model(x), torch.zeros(7, dtype=torch.int64)).backward()
    trace.save_html(tmp_path / "step.html")
    (step,) = data_of(tmp_path / "step.html")["steps"]
    (scatter, back), (gather,) = scenes(step, "scatter"), scenes(step, "gather")
    assert scatter["counts"] == gather["counts"] == [3, 2, 2]
    assert gather["tensors"][0]["nbytes"] == [36, 24, 24]
    assert (back["title"], back["counts"]) == ("Scatter (backward): 7 rows, 3 ranks", [3, 2, 2])
    assert [each["what"] for each in (scatter, gather, back)] == ["batch", "outputs", "gradient of the outputs"]
    assert back["tensors"][0]["nbytes"] == [36, 24, 24]
    broadcast, reduce = scenes(step, "round")
    assert (broadcast["operation"], broadcast["nbytes"]) == ("broadcast", [0, 72, 72])
    assert [(arrow["from"], arrow["to"], arrow["nbytes"]) for arrow in broadcast["arrows"]] == [
        ([-1], [1], 72),
        ([-1], [2], 72),
    ]
    assert (reduce["operation"], reduce["nbytes"], reduce["bucket"]) == ("reduce", [72, 72, 72], 0)
    kinds = [scene["kind"] for scene in step["scenes"]]
    assert kinds.index("scatter") < kinds.index("forward") < kinds.index("gather") < kinds.index("backward")
    assert sorted((each["rank"], each["bucket"]) for each in scenes(step, "backward")[0]["ready"]) == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]


def test_what_every_rank_gets_whole_has_a_scene(tmp_path):
    class Scaled(torch.nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    model = mgpu_core.DataParallel(Scaled(5, 3), ["cpu"] * 3)
    with mgpu_core.explain() as trace, torch.no_grad():
        model(torch.randn(7, 5), mgpu_core.Replicate(torch.ones(3)))
    trace.save_html(tmp_path / "step.html")
    (step,) = data_of(tmp_path / "step.html")["steps"]
    first, parameters = scenes(step, "round")
    assert (first["operation"], first["nbytes"]) == ("broadcast", [0, 12, 12])
    assert (parameters["operation"], parameters["nbytes"], parameters["bucket"]) == ("broadcast", [0, 72, 72], -1)
    assert step["buckets"] == []


def test_one_file_without_the_network(tmp_path):
    with mgpu_core.explain() as trace:
        comm.broadcast(torch.ones(4), ["cpu"] * 2)
    trace.save_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=\"(?!data:,)", text)
    assert "/*style*/" not in text
    assert "/*player*/" not in text
    assert "/*trace*/" not in text


def test_text_of_the_story_cannot_end_its_element(tmp_path):
    with mgpu_core.explain() as trace:
        comm.broadcast(torch.ones(4), ["cpu"] * 2)
    trace.environment["GPU"] = "</script><script>alert(1)</script>/*player*/"
    trace.save_html(tmp_path / "page.html")
    assert "alert(1)</script>" not in (tmp_path / "page.html").read_text()
    assert data_of(tmp_path / "page.html")["environment"]["GPU"] == "</script><script>alert(1)</script>/*player*/"


def test_a_long_story_keeps_its_last_steps(tmp_path, monkeypatch):
    model = mgpu_core.DataParallel(torch.nn.Linear(5, 3), ["cpu"] * 2)
    with mgpu_core.explain() as trace:
        for _ in range(8):
            model(torch.randn(4, 5))
    whole = len(page.page_of(trace).encode())
    monkeypatch.setattr(page, "MOST_NBYTES", whole - 1)
    trace.save_html(tmp_path / "page.html")
    data = data_of(tmp_path / "page.html")
    assert data["left_out"] == 1
    assert [step["number"] for step in data["steps"]] == [1, 2, 3, 4, 5, 6, 7]
    monkeypatch.setattr(page, "MOST_NBYTES", 1000)
    with pytest.raises(ValueError, match="the last step alone"):
        trace.save_html(tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_many_arrows_are_counted(tmp_path):
    with mgpu_core.explain() as trace:
        comm.all_gather([torch.ones(2) for _ in range(12)])
    (scene,) = page.page_data(trace)["steps"][0]["scenes"]
    assert len(scene["arrows"]) == 128
    assert scene["more"] == 12 * 12 - 128


def test_an_unwritable_place_is_an_error(tmp_path):
    with mgpu_core.explain() as trace:
        comm.broadcast(torch.ones(4), ["cpu"] * 2)
    with pytest.raises(OSError):
        trace.save_html(tmp_path / "nowhere" / "page.html")


def test_a_step_of_which_nothing_is_known_has_a_scene(tmp_path):
    """A graph that is replayed, or calls that move nothing."""
    with mgpu_core.explain() as trace:
        mgpu_core.scatter({"a": 3}, ["cpu"] * 2)
    trace.save_html(tmp_path / "page.html")
    (step,) = data_of(tmp_path / "page.html")["steps"]
    (scene,) = step["scenes"]
    assert (scene["kind"], scene["title"]) == ("step", "calls, as a whole")


def texts_of(trace):
    return [scene["text"] for step in page.page_data(trace)["steps"] for scene in step["scenes"]]


def test_what_a_rank_has_already_is_not_told_as_moved():
    """Text, table and arrows count the same: of a round of a ring, one chunk a rank."""
    with mgpu_core.explain() as trace:
        comm.all_reduce([torch.ones(1024) for _ in range(8)], algorithm="ring")
        comm.all_gather([torch.ones(25) for _ in range(2)])
    *ring, gathered = texts_of(trace)
    assert ring[0] == "4 KiB of 1 tensor are moved and summed, in 8 operations."
    assert ring[-1] == "4 KiB of 1 tensor are copied, in 8 operations."
    assert gathered == "200 B of 1 tensor are copied, in 4 operations."
    assert len(ring) == 14
    (head, *rows), *_ = (step["table"] for step in page.page_data(trace)["steps"])
    moved = {row[0]: row[head.index("moved")] for row in rows}
    assert (moved["all_reduce"], moved["all_gather"]) == ("56 KiB", "200 B")


@pytest.mark.several_ranks
def test_an_all_gather_knows_its_parts(tmp_path, ranks):
    with mgpu_core.explain() as trace:
        comm.all_gather([torch.ones(2) for _ in range(ranks)])
    trace.save_html(tmp_path / "page.html")
    (step,) = data_of(tmp_path / "page.html")["steps"]
    arrows = [arrow for scene in step["scenes"] for arrow in scene["arrows"]]
    assert {(arrow["from"][0], arrow["offset"], arrow["whole"]) for arrow in arrows} == {
        (rank, rank * 8, ranks * 8) for rank in range(ranks)
    }
    assert {arrow["to"][0] for arrow in arrows} == set(range(ranks))


def test_bars_that_took_turns_in_one_thread_are_told_apart():
    """A DataParallel's backward over CPU ranks runs in the caller's thread; the ranks of a step have threads."""
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)), torch.ones(6, 4)
    model = mgpu_core.DataParallel(net, ["cpu"] * 3)
    model(x).sum().backward()
    with mgpu_core.explain() as trace:
        model(x).sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = mgpu_core.TrainStep(net, functional.mse_loss, optimizer, ["cpu"] * 3, workers="threads")
    step(x, torch.ones(6, 2))
    with mgpu_core.explain() as threads:
        step(x, torch.ones(6, 2))
    for recorded, expected in ((trace, {"backward"}), (threads, set())):
        lanes = page.page_data(recorded)["steps"][0]["lanes"]
        bars = [bar for lane in lanes if lane["name"].startswith("rank") for bar in lane["bars"]]
        assert {bar["name"] for bar in bars if bar.get("turns")} == expected
        assert {bar["name"] for bar in bars} > expected
