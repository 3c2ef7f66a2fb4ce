"""A recording told: its steps, its table, its trace, and the numbers of a known step."""

import json
import threading
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional

import mgpu_core
from mgpu_core import comm
from mgpu_core.tools.explain.perfetto import trace_of
from mgpu_core.tools.explain.phases import bus_gbps, moved_nbytes, phases_of
from mgpu_core.tools.explain.scenes import scenes_of
from mgpu_core.trace import tracer
from mgpu_core.trace.events import Collective


def net():
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


PARAMETERS_NBYTES = 4 * (6 * 4 + 4 + 4 * 2 + 2)


def forward_and_backward(model, rows=10):
    x = torch.randn(rows, 6)
    functional.cross_entropy(model(x), torch.zeros(rows, dtype=torch.int64)).backward()


def test_the_steps_of_a_story():
    model = mgpu_core.DataParallel(net(), ["cpu"] * 3)
    module = net()
    step = mgpu_core.TrainStep(module, functional.mse_loss, torch.optim.SGD(module.parameters(), 0.1), ["cpu"] * 2)
    with mgpu_core.explain() as trace:
        forward_and_backward(model)
        comm.all_reduce([torch.ones(4) for _ in range(2)])
        step(torch.randn(6, 6), torch.randn(6, 2))
        step.evaluate(torch.randn(6, 6), torch.randn(6, 2))
        comm.broadcast(torch.ones(4), ["cpu"] * 8)
    assert [each.name for each in trace.steps] == ["data_parallel", "calls", "train_step", "evaluate", "calls"]
    assert [len(each.devices) for each in trace.steps] == [3, 2, 2, 2, 8]
    assert [each.number for each in trace.steps] == [0, 1, 2, 3, 4]
    assert trace.dropped == 0


def test_the_backward_belongs_to_its_forward():
    model = mgpu_core.DataParallel(net(), ["cpu"] * 2)
    with mgpu_core.explain() as trace:
        for _ in range(2):
            forward_and_backward(model)
    assert len(trace) == 2
    for step in trace.steps:
        assert operations(step) == OPERATIONS
        assert ranks_of_backward(step) == [0, 1]


OPERATIONS = ["scatter", "broadcast", "gather", "scatter", "reduce"]


def operations(step):
    return [call.operation for call in step.collectives]


def ranks_of_backward(step):
    return sorted(span.rank for span in step.spans if span.step == "backward")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_backward_finds_its_forward_in_any_order(order):
    """Also past a forward without a graph, and calls of the user's own that look like a backward."""
    model = mgpu_core.DataParallel(net(), ["cpu"] * 2)
    with mgpu_core.explain() as trace:
        losses = [model(torch.randn(rows, 6)).sum() for rows in (4, 6, 8)]
        with torch.no_grad():
            model(torch.randn(10, 6))
        comm.reduce_add([torch.ones(4)] * 2)
        comm.scatter(torch.ones(4), ["cpu"] * 2)
        for index in order:
            losses[index].backward()
    assert [step.name for step in trace.steps] == ["data_parallel"] * 4 + ["calls"]
    assert [operations(step) for step in trace.steps] == [*[OPERATIONS] * 3, OPERATIONS[:3], ["reduce", "scatter"]]
    assert [ranks_of_backward(step) for step in trace.steps] == [[0, 1]] * 3 + [[], []]
    for step, rows in zip(trace.steps, (4, 6, 8, 10), strict=False):
        assert {sum(cut.counts) for cut in step.cuts} == {rows}


def test_two_threads_at_once_have_steps_of_their_own():
    models = [mgpu_core.DataParallel(net(), ["cpu"] * 2) for _ in range(2)]
    together = threading.Barrier(2)

    def train(model, rows):
        for _ in range(5):
            together.wait(30)
            forward_and_backward(model, rows)

    with mgpu_core.explain() as trace:
        threads = [threading.Thread(target=train, args=(model, 8 * n)) for n, model in enumerate(models, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [operations(step) for step in trace.steps] == [OPERATIONS] * 10
    assert sorted({sum(cut.counts) for cut in step.cuts} == {8} for step in trace.steps) == [False] * 5 + [True] * 5


def test_a_step_that_was_cut_off_keeps_its_name():
    model = mgpu_core.DataParallel(net(), ["cpu"] * 2)
    with tracer.tracing() as recorded:
        recorded.limit = 5
        forward_and_backward(model)
    trace = mgpu_core.tools.explain.trace.Trace()
    trace.fill(recorded)
    assert [step.name for step in trace.steps] == ["data_parallel"]
    assert trace.dropped > 0


def test_what_an_earlier_recording_began_is_no_step_of_this_one():
    model = mgpu_core.DataParallel(net(), ["cpu"] * 2)
    with mgpu_core.explain():
        loss = model(torch.randn(4, 6)).sum()
    with mgpu_core.explain() as trace:
        loss.backward()
    assert [step.name for step in trace.steps] == ["calls"]


def test_ranks_that_were_not_seen_keep_their_numbers():
    call = Collective("reduce", "direct", (1, 3), (4, 4), ("cpu", "xpu:0"), (), {}, 0, 1, 1)
    assert mgpu_core.tools.explain.trace.Step(0, "calls", [call]).devices == ("", "cpu", "", "xpu:0")


def test_one_rank_has_a_backward_and_a_profile():
    model = mgpu_core.DataParallel(net(), ["cpu"])
    with mgpu_core.explain() as trace:
        forward_and_backward(model)
    assert ranks_of_backward(trace.step()) == [0]
    assert trace.profile().backward_seconds > 0


@pytest.mark.several_ranks
def test_the_table_counts_what_moved(ranks):
    model = mgpu_core.DataParallel(net(), ["cpu"] * ranks)
    with mgpu_core.explain() as trace:
        forward_and_backward(model, rows=16)
    moved = {phase.name: phase.moved_nbytes for phase in phases_of(trace.step())}
    assert moved == {
        "scatter": 16 * 6 * 4,
        "replicate": (ranks - 1) * PARAMETERS_NBYTES,
        "forward": 0,
        "gather": 16 * 2 * 4,
        "scatter (backward)": 16 * 2 * 4,
        "backward": 0,
        "reduce": ranks * PARAMETERS_NBYTES,
    }
    text = trace.table()
    assert text.splitlines()[0].startswith(f"recorded step 0: data_parallel, {ranks} ranks (cpu, cpu")
    for name in moved:
        assert f"\n{name}" in text


WAYS = {
    "threads": "workers: threads (each rank ran in its own thread)",
    "caller": "workers: caller (all ranks ran one after the other in the caller's thread)",
}


def train_step(module=None, ranks=2, **options):
    module = module or net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    return mgpu_core.TrainStep(module, functional.mse_loss, optimizer, ["cpu"] * ranks, **options)


class CallsAWrapper(torch.nn.Module):
    """Each rank runs ranks of its own, always in threads."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return mgpu_core.data_parallel(self.inner, x, ["cpu"] * 2)


@pytest.mark.parametrize("make", [net, CallsAWrapper])
@pytest.mark.parametrize("way", ["threads", "caller"])
def test_a_step_says_how_its_ranks_ran(way, make):
    model = mgpu_core.DataParallel(make(), ["cpu"] * 2, workers=way)
    step = train_step(make(), workers=way)
    with mgpu_core.explain() as trace:
        forward_and_backward(model)
        step(torch.randn(6, 6), torch.randn(6, 2))
        step.evaluate(torch.randn(6, 6), torch.randn(6, 2))
    assert [each.name for each in trace.steps] == ["data_parallel", "train_step", "evaluate"]
    for each in trace.steps:
        assert each.workers == way
        assert trace.table(each.number).splitlines()[1] == WAYS[way]


def test_the_ranks_of_a_cut_module_run_in_threads():
    module = mgpu_core.TensorParallel(net(), ["cpu"] * 2, plan={"0": "column", "2": "row"})
    step = mgpu_core.TrainStep(module, functional.mse_loss, torch.optim.SGD(module.parameters(), 0.1))
    with mgpu_core.explain() as trace:
        step(torch.randn(6, 6), torch.randn(6, 2))
    assert trace.step().workers == "threads"


def test_what_auto_means_is_said():
    step = train_step()
    with mgpu_core.explain() as trace:
        step(torch.randn(6, 6), torch.randn(6, 2))
    assert [each.workers for each in trace.steps] == ["caller"]
    assert step.plan()[0].workers == "caller"
    assert WAYS["caller"] in trace.table()


def test_nothing_is_said_of_how_one_rank_ran_or_of_calls():
    step = train_step(ranks=1)
    with mgpu_core.explain() as trace:
        step(torch.randn(6, 6), torch.randn(6, 2))
        mgpu_core.parallel_apply([net()] * 2, [torch.randn(2, 6)] * 2)
    assert [each.name for each in trace.steps] == ["train_step", "calls"]
    for each in trace.steps:
        assert each.workers == ""
        assert "workers" not in trace.table(each.number)


@pytest.mark.several_ranks
@pytest.mark.parametrize("algorithm", ["naive", "direct", "ring"])
def test_all_algorithms_but_the_tree_move_as_much(ranks, algorithm):
    with mgpu_core.explain() as trace:
        comm.all_reduce([torch.ones(24) for _ in range(ranks)], algorithm=algorithm)
    (call,) = trace.step().collectives
    assert moved_nbytes(call) == 2 * (ranks - 1) * 24 * 4


def test_bus_bandwidth_by_hand():
    def call(operation, nbytes, seconds):
        ranks = tuple(range(len(nbytes)))
        times = {"cpu": (0, round(seconds * 1e9))}
        return Collective(operation, "direct", ranks, nbytes, ("cpu",) * len(nbytes), (), times, 0, 1, 1)

    assert bus_gbps([call("all_reduce", (4000,) * 4, 1e-6)]) == 6.0  # 4000 bytes x 2 x 3 / 4 in 1 us
    assert bus_gbps([call("broadcast", (0, 3000), 1e-6)]) == 3.0
    assert bus_gbps([call("gather", (1000, 1000, 1000, 1000), 1e-6)]) == 3.0
    assert bus_gbps([call("reduce", (5,), 1e-6)]) is None
    assert bus_gbps([]) is None


def test_the_trace_has_a_track_per_rank(tmp_path):
    model = mgpu_core.DataParallel(net(), ["cpu"] * 3)
    with mgpu_core.explain() as trace:
        forward_and_backward(model)
    trace.save_trace(tmp_path / "trace.json")
    saved = json.loads((tmp_path / "trace.json").read_text())
    assert saved == json.loads(json.dumps(trace_of(trace)))
    events = saved["traceEvents"]
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {"rank 0", "rank 1", "rank 2", "host"} <= set(names.values())
    forwards = [each for each in events if each["name"] == "forward"]
    assert sorted(names[each["pid"], each["tid"]] for each in forwards) == ["rank 0", "rank 1", "rank 2"]
    copies = [each for each in events if each["name"] == "copy" and names[each["pid"], each["tid"]] == "host"]
    # 3 of the rows, 2 x 4 parameters, 3 outputs; the rows of a gradient that is one number travel by themselves
    assert len(copies) >= 3 + 8 + 3
    assert all(each["ts"] >= 0 and each.get("dur", 0) >= 0 for each in events if each["ph"] != "M")


def test_the_profile_of_a_step():
    module = net()
    step = mgpu_core.TrainStep(
        module, functional.mse_loss, torch.optim.SGD(module.parameters(), 0.1), ["cpu"] * 2, bucket_nbytes=40
    )
    x, y = torch.randn(6, 6), torch.randn(6, 2)
    for _ in range(2):
        step(x, y)
    with mgpu_core.explain() as trace:
        step(x, y)
    profile = trace.profile(name="small")
    assert (profile.name, profile.ranks, profile.rows) == ("small", 2, 6)
    assert profile.scatter_nbytes == 6 * 6 * 4 + 6 * 2 * 4
    assert sum(bucket.nbytes for bucket in profile.buckets) == PARAMETERS_NBYTES
    assert len(profile.buckets) == 3
    assert all(0 <= bucket.ready_fraction <= 1 for bucket in profile.buckets)
    assert min(profile.forward_seconds, profile.backward_seconds, profile.update_seconds) > 0


def test_what_has_no_profile():
    with mgpu_core.explain() as trace:
        comm.broadcast(torch.ones(4), ["cpu"] * 2)
    with pytest.raises(ValueError, match="no forward and backward"):
        trace.profile()
    with pytest.raises(IndexError, match="the trace has 1 step, and no step 3"):
        trace.table(3)


def test_a_module_in_parts_has_no_profile():
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    pipe = mgpu_core.Pipeline(module, ["cpu"] * 2, chunks=3)
    step = mgpu_core.TrainStep(pipe, functional.mse_loss, torch.optim.SGD(module.parameters(), 0.1))
    with mgpu_core.explain() as trace:
        step(torch.ones(6, 4), torch.ones(6, 2))
    with pytest.raises(ValueError, match=r"step 0 .* ran over a Pipeline or a TensorParallel: none is predicted"):
        trace.profile()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.out(self.down(self.up(x)))


def test_a_step_whose_layers_are_cut():
    plan = {"up": "column", "down": "row", "out": "column_gathered"}
    tp = mgpu_core.TensorParallel(Block(), ["cpu"] * 2, plan)
    with mgpu_core.explain() as trace:
        tp(torch.ones(5, 4)).sum().backward()
    step = trace.step()
    assert (step.name, step.devices) == ("tensor_parallel", ("cpu", "cpu"))
    assert sorted(span.rank for span in step.spans if span.step == "forward") == [0, 1]
    assert [call.operation for call in step.collectives].count("all_reduce") == 2  # of the row, forward and backward
    assert [scene["title"] for scene in scenes_of(step) if "all_reduce" in scene["title"]] == [
        "all_reduce (direct): the outputs of down are all-reduced",
        "all_reduce (direct): tensors are all-reduced",
    ]
    with pytest.raises(ValueError, match="none is predicted"):
        trace.profile()


def test_nothing_was_recorded(tmp_path):
    with mgpu_core.explain() as trace:
        pass
    assert len(trace) == 0
    with pytest.raises(ValueError, match="nothing was recorded"):
        trace.save_html(tmp_path / "page.html")
    with pytest.raises(IndexError):
        trace.table()
    assert list(tmp_path.iterdir()) == []


def test_an_error_inside_passes_and_leaves_the_story():
    trace = None

    def broken():
        nonlocal trace
        with mgpu_core.explain() as trace:
            comm.broadcast(torch.ones(4), ["cpu"] * 2)
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert [step.name for step in trace.steps] == ["calls"]


def test_bad_windows_and_a_second_recording():
    with pytest.raises(ValueError, match="steps at least 1"), mgpu_core.explain(steps=0):
        pass
    with pytest.raises(ValueError, match="skip must be"), mgpu_core.explain(skip=-1):
        pass
    with mgpu_core.explain(), pytest.raises(RuntimeError, match="already on"), mgpu_core.explain():
        pass


def test_the_profiler_sees_every_rank():
    """Their threads are older than the profiler, which by itself does not look into them."""
    module = net()
    step = mgpu_core.TrainStep(
        module, functional.mse_loss, torch.optim.SGD(module.parameters(), 0.1), ["cpu"] * 3, workers="threads"
    )
    x, y = torch.randn(6, 6), torch.randn(6, 2)
    step(x, y)
    with mgpu_core.trace.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(x, y)
    names = {event.name for event in profiler.events()}
    expected = {f"mgpu {what} rank {rank}" for what in ("forward", "loss", "backward") for rank in range(3)}
    assert expected <= names
    assert {"mgpu train_step", "mgpu update", "mgpu all_reduce bucket 0"} <= names
    threads = {event.thread for event in profiler.events() if event.name.startswith("mgpu forward")}
    assert len(threads) == 3


def test_on_gpus_a_span_is_an_nvtx_range_too(monkeypatch):
    """Of the same name, and closed where the work inside fails."""
    ranges = []
    monkeypatch.setattr(import_module("mgpu_core.trace.profilers"), "_has_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    with mgpu_core.trace.labels():
        with tracer.span("forward", 1):
            pass
        with pytest.raises(KeyError), tracer.span("update"):
            raise KeyError
    assert ranges == ["mgpu forward rank 1", "end", "mgpu update", "end"]


def test_the_profiler_keeps_its_own_config():
    with pytest.raises(TypeError, match="experimental_config"), mgpu_core.trace.profile(experimental_config=None):
        pass


def test_two_backwards_of_one_forward_and_one_that_stops_early():
    model = mgpu_core.DataParallel(net(), ["cpu"] * 2)
    x = torch.randn(8, 6, requires_grad=True)
    with mgpu_core.explain() as trace:
        out = model(x).sum()
        out.backward(retain_graph=True)
        torch.autograd.grad(out, x)
    backwards = [span for span in trace.step().spans if span.step == "backward"]
    for rank in range(2):
        first, second = [span for span in backwards if span.rank == rank]
        assert first.end_ns < second.begin_ns
    assert all(span.begin_ns <= span.end_ns for span in backwards)
    assert trace.profile().backward_seconds > 0


def test_what_was_too_much_is_said():
    with mgpu_core.explain() as trace:
        comm.broadcast(torch.ones(4), ["cpu"] * 2)
    assert "too many" not in trace.table()
    trace.dropped = 7
    assert "7 events more were too many to keep" in trace.table()


def test_calls_that_move_nothing_have_a_table():
    with mgpu_core.explain() as trace:
        mgpu_core.scatter({"a": 3}, ["cpu"] * 2)
    assert "scatter" in trace.table()


def test_a_tensor_that_is_given_twice_is_each_ranks():
    same = torch.ones(4)
    with mgpu_core.explain() as trace:
        comm.reduce_add([same] * 3)
        whole = torch.arange(8.0)
        comm.gather([whole[:4], whole[4:]], out=torch.empty(8))
    summed, gathered = trace.step().collectives
    assert [rank for rank, _, _ in summed.hops[0].sources] == [0, 1, 2]
    assert [hop.sources[0][0] for hop in gathered.hops] == [0, 1]
