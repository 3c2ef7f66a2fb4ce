"""`mgpu advise --inference`: which net a script calls, the ways that are measured, and the advice."""

import asyncio
import json
import sys
import threading

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core.tools.advise.inference import InferenceAdvice, Load, ServingWay, advise_inference, asked_for, ways_of
from mgpu_core.tools.advise.watching import watching
from mgpu_core.tools.cli import main

CPU = torch.device("cpu")


def seen_in(call):
    with watching() as watch:
        call()
    return watch.best()


def test_the_outermost_net_with_its_arguments():
    net, x = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.ones(5, 4)

    @torch.no_grad()
    def script():
        for _ in range(3):
            net(input=x)

    seen = seen_in(script)
    assert (seen.net, seen.count) == (net, 3)
    assert seen.call[0] == ()
    assert seen.call[1]["input"] is x


def test_training_losses_and_failures_are_passed_over():
    net, x = nn.Linear(4, 2), torch.ones(5, 4)

    def script():
        net(x).sum().backward()
        with torch.no_grad():
            nn.MSELoss()(x, x)
            with pytest.raises(RuntimeError):
                net(torch.ones(5, 3))

    assert seen_in(script) is None
    net.eval()
    seen = seen_in(lambda: [script(), net(x)])  # eval mode, with gradients
    assert (seen.net, seen.count) == (net, 2)


def test_the_net_that_is_called_most_often():
    first, second, x = nn.Linear(4, 2).eval(), nn.Linear(4, 2).eval(), torch.ones(5, 4)
    assert seen_in(lambda: [net(x) for net in (first, second, second)]).net is second
    assert seen_in(lambda: [net(x) for net in (first, second)]).net is first


def test_a_predictors_own_net_and_request():
    net, x = nn.Linear(4, 2), torch.ones(5, 4)

    def script():
        with mgpu_core.Predictor(net, ["cpu"] * 2, max_batch=2) as predict:
            predict(x)  # cut into parts
            predict.submit(x, timeout=1).result()
            asyncio.run(predict.asubmit(x))

    seen = seen_in(script)
    assert (seen.net, seen.count) == (net, 3)
    assert (seen.call[0][0] is x, seen.call[1]) == (True, {})


def test_a_wrapper_is_taken_off():
    net, x = nn.Linear(4, 2), torch.ones(6, 4)
    wrapper = mgpu_core.DataParallel(net, ["cpu"] * 2).eval()
    seen = seen_in(lambda: [wrapper(x) for _ in range(2)])
    assert (seen.net, seen.bare_net, seen.count) == (wrapper, net, 2)


def test_nothing_is_left_behind():
    before = mgpu_core.Predictor.__call__
    with pytest.raises(KeyError), watching() as watch:
        raise KeyError
    nn.Linear(4, 2).eval()(torch.ones(1, 4))
    assert mgpu_core.Predictor.__call__ is before
    assert watch.best() is None


def test_the_ways_that_are_measured():
    ways = ways_of(2, 64, 16)
    assert ways[0] == ServingWay(0)
    settings = [(way.ranks, way.max_batch, way.max_wait_ms) for way in ways[1:]]
    assert settings == [(ranks, size, wait) for ranks in (1, 2) for size in (8, 16, 64) for wait in (0.0, 2.0)]
    assert {way.ranks for way in ways_of(6, 1, 4)} == {0, 1, 2, 4, 6}
    assert {way.max_batch for way in ways_of(2, 64, 16, [5])} == {0, 5}


def test_each_caller_asks_at_least_three_times():
    asked = []
    load = asked_for(lambda: asked.append(threading.get_ident()), 7, 2, 0.0)
    assert len(asked) == 2 + 2 * 3  # two to warm up
    assert load.rate > 0
    assert 0 <= load.p50_s <= load.p99_s
    with pytest.raises(ZeroDivisionError):
        asked_for(lambda: 1 / 0, 1, 2, 0.0)


def advice(*rates, own=None, rows=64):
    """The bare net, then Predictors of 1 and 2 ranks."""
    ways = [ServingWay(0), ServingWay(1, 16, 2.0), ServingWay(2, 8, 0.0)]
    for way, one, whole in zip(ways, rates, own or rates, strict=True):
        way.one_row = Load(one, 1e-3, 2e-3)
        way.own = Load(whole, 3e-3, 4e-3) if rows > 1 else None
    return InferenceAdvice("Net", ("cpu", "cpu"), rows, 16, tuple(ways), ("a note",), {"torch": "2"})


@pytest.mark.parametrize(
    ("rates", "ranks"), [((100, 100, 105), 0), ((100, 110, 200), 2), ((100, 195, 200), 1), ((95, 99, 100), 0)]
)
def test_the_simplest_way_that_is_nearly_the_fastest(rates, ranks):
    assert advice(*rates).best("one_row").ranks == ranks


def test_the_text():
    found = advice(100, 110, 200, own=(100, 90, 80))
    assert found.sentences == [
        "one-row requests of 16 callers: use a Predictor on cpu, cpu: 2.00 times the rows per second of the bare net.\n"
        "with mgpu_core.Predictor(net, ['cpu', 'cpu'], max_batch=8, max_wait_ms=0) as predict:\n"
        "    y = predict(x)  # in any thread",
        "batches of 64 rows: keep the bare net; no Predictor is more than 5 % faster.",
    ]
    lines = str(found).splitlines()
    assert lines[3].split() == ["way", "one", "row:", "rows/s", "p50", "p99", "64", "rows:", "rows/s", "p50", "p99"]
    assert lines[4].split() == ["bare", "net", "100", "1", "ms", "2", "ms", "100", "3", "ms", "4", "ms"]
    assert "note: a note" in lines
    told = json.loads(found.to_json())
    assert (told["format"], told["rows"], told["ways"][2]["one_row"]["rate"]) == (
        "mgpu_core advice inference 1",
        64,
        200,
    )
    assert told["advice"] == found.sentences


def test_one_row_of_the_scripts_own_is_measured_once():
    found = advice(100, 110, 200, rows=1)
    assert (len(found.sentences), found.best("own")) == (1, None)
    assert "1 rows" not in str(found)


class Summed(nn.Module):
    """Adds to a buffer, so it cannot be in a Predictor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total += x.sum(0)
        return x * self.weight


def test_a_way_that_fails_is_told_and_the_others_go_on():
    net = Summed()
    found = advise_inference(net, ((torch.ones(2, 4),), {}), [CPU], batches=[2], callers=1, seconds=0.3)
    assert [way.error == "" for way in found.ways] == [True, False, False]
    assert (
        "failed: Predictor, 1 rank, max_batch=2, max_wait_ms=0: RuntimeError: the forward of Summed writes "
        "its buffer" in str(found)
    )
    assert all("keep the bare net" in each for each in found.sentences)


def test_the_net_is_left_alone_and_the_time_is_bounded():
    net = nn.Linear(4, 2).train()
    weight = net.weight.clone()
    found = advise_inference(net, ((), {"input": torch.ones(3, 4)}), [CPU] * 2, callers=2, seconds=1e-3)
    assert net.training
    assert torch.equal(net.weight, weight)
    assert len(found.ways) == 1
    assert "12 of 13 ways not measured" in found.notes[-1]


def test_what_cannot_be_measured():
    with pytest.raises(ValueError, match="a request needs tensors or Rows with 1 or more rows"):
        advise_inference(nn.Linear(4, 2), ((torch.tensor(1.0),), {}), [CPU])
    pipeline = mgpu_core.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ["cpu"] * 2)
    with pytest.raises(ValueError, match="runs it there as one rank"):
        advise_inference(pipeline, ((torch.ones(2, 4),), {}), [CPU])


SCRIPT = """
import sys
import torch
net = torch.nn.Linear(4, 2)
if __name__ == "__main__":
    with torch.inference_mode():
        net(torch.ones(6, 4))
    sys.exit(0)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def write(text=SCRIPT):
        (tmp_path / "script.py").write_text(text)
        return "script.py"

    return write


FAST = ["--inference", "--devices", "cpu,cpu", "--callers", "2", "--batches", "4", "--seconds", "0.5"]


def test_the_command(script, tmp_path, capsys):
    assert main(["advise", *FAST, "--json", "a.json", script()]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "script.py: Linear, bare and in a Predictor on cpu, cpu: one row, 2 callers; then 6 rows, 1 caller"
    assert lines[0] == head
    assert any(line.startswith("one-row requests of 2 callers: ") for line in lines)
    assert any(line.startswith("batches of 6 rows: ") for line in lines)
    assert lines[-1] == "written: a.json"
    told = json.loads((tmp_path / "a.json").read_text())
    assert (told["rows"], told["callers"], told["devices"]) == (6, 2, ["cpu", "cpu"])
    assert told["ways"][0]["own"]["rate"] > 0


@pytest.mark.parametrize(
    ("words", "text", "status", "told"),
    [
        ([], "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))", 2, "calls no torch.nn.Module with parameters in"),
        ([], SCRIPT.replace("torch.ones(6, 4)", "torch.ones(4)"), 1, ""),  # its rows are no rows
        ([], SCRIPT.replace("torch.ones(6, 4)", "torch.ones(6, 4).to_sparse()"), 2, "sparse"),
        ([], "raise SystemExit(3)", 3, ""),
        ([], "1 / 0", 1, "ZeroDivisionError"),
        (["--loss", "mse"], SCRIPT, 2, "--loss has no effect with --inference"),
        (["--device-memory", "1GiB"], SCRIPT, 2, "--device-memory has no effect with --inference"),
        (["--callers", "0"], SCRIPT, 2, "must be above 0"),
    ],
)
def test_what_ends_in_one_sentence(script, capsys, words, text, status, told):
    assert main(["advise", *FAST, *words, script(text)]) == status
    assert told in capsys.readouterr().err


def test_callers_are_for_inference_alone(script, capsys):
    assert main(["advise", "--callers", "2", script()]) == 2
    assert "--callers needs --inference" in capsys.readouterr().err


@pytest.mark.slow
def test_a_net_that_sleeps_is_faster_on_two_ranks():
    class Slow(nn.Linear):
        def forward(self, x):
            threading.Event().wait(0.02)  # as long for one row as for eight
            return super().forward(x)

    call = ((torch.ones(8, 4),), {})
    found = advise_inference(Slow(4, 2), call, [CPU] * 2, batches=[4, 8], callers=1, seconds=20)
    own = {(way.ranks, way.max_batch): way.own.rate for way in found.ways}
    assert own[2, 8] > 1.6 * own[0, 0]
    assert found.best("own").ranks == 2
    one_row = [way.one_row.rate for way in found.ways]
    assert one_row[0] > 0.8 * max(one_row)  # of one caller no Predictor answers more


def test_a_net_with_a_cache_is_refused_once():
    class DynamicCache:
        pass

    net, x = nn.Linear(4, 2).eval(), torch.ones(5, 4)
    text = r"keeps a cache between its calls \(past_key_values\).*Predictor\(net, method='generate'\)"
    with pytest.raises(ValueError, match=text):
        advise_inference(net, ((x,), {"past_key_values": DynamicCache()}), [CPU] * 2)
