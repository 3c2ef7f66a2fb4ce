"""What a recording holds: every step of a pass, with its ranks, rows, bytes and hops; nothing when it is off."""

import contextvars
import gc
import os
import threading
import weakref

import pytest
import torch

import mgpu_core
from mgpu_core import comm
from mgpu_core.trace import tracer
from mgpu_core.trace.events import BETWEEN, ROOT, Collective, Contents, Cut, Mark, Span


def of(trace, kind, step=None):
    found = [each for each in trace.events if isinstance(each, kind)]
    return [each for each in found if step in (None, each.operation if kind is Collective else each.step)]


def names(trace):
    return {each.operation if isinstance(each, Collective) else each.step for each in trace.events}


def test_off_is_one_shared_object():
    assert not tracer.is_tracing()
    assert tracer.span("a") is tracer.span("b", 3, torch.device("cpu"), 4)
    tracer.mark("nothing")
    tracer.emit(lambda *_: pytest.fail("nobody wants it"))
    assert tracer.mark_devices([torch.device("cpu")]) is None


def test_every_step_of_the_road():
    net = torch.nn.Linear(3, 2)
    model = mgpu_core.DataParallel(net, ["cpu"] * 2)
    with tracer.tracing() as trace:
        assert tracer.is_tracing()
        loss = (model(torch.randn(5, 3)) * torch.arange(10.0).reshape(5, 2)).sum()
        loss.backward()
    assert not tracer.is_tracing()
    steps = {"data_parallel", "scatter", "replicate", "broadcast", "apply", "forward", "gather", "backward", "reduce"}
    assert steps <= names(trace)

    (cut,), (joined,), (back,) = (of(trace, Cut, step) for step in ("scatter", "gather", "scatter (backward)"))
    assert (back.name, back.counts, back.nbytes) == ("gradient of the output", (3, 2), (24, 16))
    assert (cut.name, cut.counts, cut.shapes, cut.nbytes) == ("inputs[0]", (3, 2), ((3, 3), (2, 3)), (36, 24))
    assert (cut.route, cut.source, cut.devices, cut.dtype) == ("copy", "cpu", ("cpu", "cpu"), "float32")
    assert (joined.name, joined.counts, joined.nbytes) == ("outputs", (3, 2), (24, 16))

    (contents,) = of(trace, Contents)
    assert (contents.bucket, contents.names, contents.nbytes) == (0, ("bias", "weight"), (8, 24))
    (broadcast,), (reduce,) = of(trace, Collective, "broadcast"), of(trace, Collective, "reduce")
    assert (broadcast.nbytes, reduce.nbytes) == ((0, 32), (32, 32))
    assert broadcast.route == "direct"

    forwards = of(trace, Span, "forward")
    assert sorted(each.rank for each in forwards) == [0, 1]
    assert len({each.thread for each in forwards}) == 2
    assert all(each.end_ns > each.begin_ns and each.device == "cpu" for each in forwards)


def test_what_comes_back_in_backward():
    model = mgpu_core.DataParallel(torch.nn.Linear(3, 2), ["cpu"] * 3)
    x = torch.randn(6, 3)
    with tracer.tracing() as trace:
        (model(x) * torch.ones(6, 2)).sum().backward()
    begun = [(each.rank, each.at_ns) for each in of(trace, Mark, "backward")]
    ready = {(each.rank, each.bucket): each.at_ns for each in of(trace, Mark, "ready")}
    assert sorted(rank for rank, _ in begun) == [0, 1, 2]
    assert sorted(ready) == [(0, 0), (1, 0), (2, 0)]
    assert all(at <= ready[rank, 0] for rank, at in begun)
    (summed,) = of(trace, Collective, "reduce")
    assert max(ready.values()) <= summed.host_begin_ns


def test_a_step_marks_what_is_ready():
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    step = mgpu_core.TrainStep(
        net, torch.nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1), ["cpu"] * 2, bucket_nbytes=64
    )
    x = torch.randn(5, 4)
    step(x, x)
    with tracer.tracing() as trace:
        step(x, x)
    step.close()
    assert [cut.route for cut in of(trace, Cut)] == ["view", "view"]
    assert [cut.name for cut in of(trace, Cut)] == ["inputs[0]", "target"]
    assert sorted(contents.names for contents in of(trace, Contents)) == [("0.weight",), ("1.weight",), ("2.weight",)]
    ready = [(each.rank, each.bucket) for each in of(trace, Mark, "ready")]
    assert sorted(ready) == [(rank, bucket) for rank in range(2) for bucket in range(3)]
    sums = of(trace, Collective, "reduce")
    assert [(each.nbytes, each.ranks, len(each.hops)) for each in sums] == [((64, 64), (0, 1), 1)] * 3
    for each in sums:
        assert each.hops[0].sources == ((0, 0, 0), (1, 0, 0))
        assert each.hops[0].targets == ((ROOT, 0, 0),)
    assert len(of(trace, Span, "backward")) == len(of(trace, Span, "forward")) == 2
    assert len(of(trace, Span, "update")) == 1


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_bucket_is_ready_once_and_whole(ranks):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = mgpu_core.TrainStep(net, torch.nn.functional.mse_loss, optimizer, ["cpu"] * ranks, bucket_nbytes=80)
    x = torch.randn(8, 4)
    step(x, x)
    with tracer.tracing() as trace:
        step(x, x)
    step.close()
    assert [len(contents.names) for contents in of(trace, Contents)] == [2, 2]
    ready = [(each.rank, each.bucket) for each in of(trace, Mark, "ready")]
    assert sorted(ready) == [(rank, bucket) for rank in range(ranks) for bucket in range(2)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_hop_by_hop(ranks):
    tensors = [torch.full((ranks * 4,), float(rank)) for rank in range(ranks)]
    with tracer.tracing() as trace:
        comm.all_reduce(tensors, algorithm="ring")
    (ring,) = of(trace, Collective)
    assert (ring.operation, ring.route, ring.nbytes) == ("all_reduce", "ring", (ranks * 16,) * ranks)
    assert all(hop.nbytes == 16 for hop in ring.hops)
    sums, copies = [h for h in ring.hops if h.sums], [h for h in ring.hops if not h.sums]
    assert len(sums) == len(copies) == ranks * (ranks - 1)
    assert len({hop.call for hop in ring.hops}) == 2 * (ranks - 1)
    for hop in sums:  # each takes its neighbour's chunk to its own
        (mine, _, at), (theirs, _, there) = hop.sources
        assert (mine - theirs) % ranks == 1
        assert at == there
        assert hop.targets == ((mine, 0, at),)
    for hop in copies:
        ((source, _, at),), ((target, _, there),) = hop.sources, hop.targets
        assert (target - source) % ranks == 1
        assert at == there
    received = [sum(hop.nbytes for hop in ring.hops if hop.targets[0][0] == rank) for rank in range(ranks)]
    assert received == [2 * (ranks - 1) * 16] * ranks  # 2 (n - 1) / n of the tensor


@pytest.mark.parametrize(("algorithm", "hops"), [("direct", [(3, 3)]), ("naive", [(3, 1), (1, 1), (1, 1)])])
def test_the_other_algorithms(algorithm, hops):
    with tracer.tracing() as trace:
        comm.all_reduce([torch.ones(5) for _ in range(3)], algorithm=algorithm)
    (call,) = of(trace, Collective)
    assert call.route == algorithm
    assert [(len(hop.sources), len(hop.targets)) for hop in call.hops] == hops


def test_the_torch_backend_tells_too():
    strided = [torch.ones(4, 6)[:, ::2] for _ in range(2)]
    with tracer.tracing() as trace:
        comm.all_reduce([torch.ones(3, dtype=torch.int16) for _ in range(2)])
        comm.reduce_add([torch.ones(3).to_sparse() for _ in range(2)])
        comm.all_gather(strided)
    everyone, sparse, gathered = of(trace, Collective)
    assert [hop.sums for hop in everyone.hops] == [True, False, False]
    assert everyone.hops[0].targets[0][0] == BETWEEN
    assert [hop.targets[0][0] for hop in everyone.hops[1:]] == [0, 1]
    assert {each.route for each in (everyone, sparse)} == {"generic"}
    assert len(gathered.hops) == 4


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sparse_parts_have_ranks_and_bytes_of_their_own(ranks):
    """Rank r has r + 1 values of 4 bytes, each with an index of 8."""
    parts = [torch.tensor([1.0] * (rank + 1) + [0.0] * (8 - rank)).to_sparse() for rank in range(ranks)]
    with tracer.tracing() as trace:
        comm.reduce_add(parts)
    (call,) = of(trace, Collective)
    assert call.nbytes == tuple(12 * (rank + 1) for rank in range(ranks))
    assert [(hop.sums, hop.sources, hop.targets, hop.nbytes, hop.call) for hop in call.hops] == [
        (True, ((rank, 0, 0),), ((ROOT, 0, 0),), 12 * (rank + 1), 0) for rank in range(ranks)
    ]


def test_what_two_backends_do_in_one_call_are_two_rounds():
    rows = [[torch.ones(4), torch.ones(2, dtype=torch.int16)] for _ in range(2)]
    with tracer.tracing() as trace:
        mgpu_core.reduce(rows, "cpu")
    (call,) = of(trace, Collective)
    assert sorted(hop.call for hop in call.hops) == [0, 1]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_synchronised_layers_tell_their_sums(ranks):
    """Forward: the sum, and of the squares; backward: two again.  One number of 4 bytes per channel and rank."""
    net = mgpu_core.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5)))
    model = mgpu_core.DataParallel(net, ["cpu"] * ranks)
    with tracer.tracing() as trace:
        model(torch.randn(16, 4)).square().sum().backward()
    sums = of(trace, Collective, "all_reduce")
    assert len(sums) == 4
    for each in sums:
        assert (each.route, each.nbytes) == ("generic", (20,) * ranks)
        assert [(hop.sums, hop.nbytes) for hop in each.hops] == [(True, 20)]  # all ranks share the one result
        assert [rank for rank, _, _ in each.hops[0].sources] == list(range(ranks))
        assert each.hops[0].targets == ((ROOT, 0, 0),)
    assert len({each.whole_step for each in sums}) == 1
    assert len(of(trace, Span, "sync_batchnorm")) == 2


def test_one_rank_has_a_backward_too():
    model = mgpu_core.DataParallel(torch.nn.Linear(3, 2), ["cpu"])
    with tracer.tracing() as trace:
        model(torch.randn(4, 3)).sum().backward()
        model(torch.randn(4, 3)).sum().backward()
    begun, ended = of(trace, Mark, "backward"), of(trace, Mark, "backward ends")
    assert [each.rank for each in begun] == [each.rank for each in ended] == [0, 0]
    assert all(one.at_ns < other.at_ns for one, other in zip(begun, ended, strict=True))
    heads = of(trace, Span, "data_parallel")
    assert [each.whole_step for each in begun] == [each.whole_step for each in heads]


def test_a_recording_keeps_no_tensors():
    """Neither do the hooks by which it learns of gradients."""
    model = mgpu_core.DataParallel(torch.nn.Linear(3, 2), ["cpu"] * 2)
    model(torch.randn(4, 3))
    freed = []
    with tracer.tracing():
        gc.disable()
        try:
            output = model(torch.randn(4, 3))
            weakref.finalize(output.grad_fn, freed.append, True)
            del output
        finally:
            gc.enable()
        assert freed == [True]


def test_a_forked_child_records_nothing():
    with tracer.tracing() as trace:
        tracer.mark("before")
        child = os.fork()
        if child == 0:
            trace.finish()
            os._exit(7 if tracer.is_tracing() or trace.events else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        tracer.mark("after")
    assert [each.step for each in trace.events] == ["before", "after"]


def test_a_failed_collective_leaves_nothing():
    with tracer.tracing() as trace, pytest.raises(mgpu_core.BackendUnavailable):
        comm.all_reduce([torch.ones(3), torch.ones(3)], algorithm="nccl")
    assert of(trace, Collective) == []
    with tracer.tracing() as trace:
        comm.broadcast(torch.ones(4), ["cpu"] * 2)
    assert len(of(trace, Collective)[0].hops) == 1


def test_what_profilers_get_does_not_stay_with_the_entries():
    """A label is memory of theirs between a step's: kept from every step, it keeps the holes around it, too."""
    gone = []

    class Label:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def __del__(self):
            gone.append(1)

    with tracer.labelled(lambda name: Label()), tracer.tracing() as trace:
        for _ in range(3):
            with tracer.span("forward", 0, torch.device("cpu")):
                pass
        assert gone == [1, 1, 1]
    assert len(trace.events) == 3


def test_a_recording_has_an_end():
    with tracer.tracing() as trace:
        trace.limit = 3
        for number in range(5):
            tracer.mark("again", number)
    assert [each.rank for each in trace.events] == [0, 1, 2]
    assert trace.dropped == 2


def test_a_clock_that_fails_ends_the_recording_and_no_step():
    """The steps go on, those of the same thread too, and nobody counts them to the one in which it failed."""

    class Clock:
        def __init__(self):
            self.asked = 0

        def mark(self, device):
            self.asked += 1
            if self.asked == 3:
                raise RuntimeError("no event")

    def steps():
        with tracer.tracing(Clock()) as trace:
            for _ in range(3):
                with tracer.span("train_step", 0, torch.device("cpu")), tracer.span("forward", 0, torch.device("cpu")):
                    pass
            assert not tracer.is_tracing()
        return trace

    with pytest.warns(RuntimeWarning, match="ended early.*RuntimeError: no event"):
        trace = steps()
    assert tracer.current_step() == 0
    assert [each.step for each in trace.events] == ["forward", "train_step"]


def test_what_is_told_wrongly_ends_the_recording_and_no_step():
    told = []

    @tracer.when_tracing
    def tell(what):
        told.append(1 / what)

    def tell_all():
        with tracer.tracing():
            tell(1)
            tell(0)
            assert not tracer.is_tracing()
            tell(2)

    tell(0)  # nobody listens
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        tell_all()
    assert told == [1]


def test_a_task_that_outlives_its_step_has_steps_of_its_own():
    """It has a copy of the context of the step in which it was made."""
    with tracer.tracing() as trace:
        with tracer.span("train_step"):
            context = contextvars.copy_context()
        for _ in range(2):
            context.run(tracer.span("train_step").__enter__)
    assert len(trace.whole_steps) == 2


def test_the_last_step_ends_before_the_recording_does():
    """Another thread's step, the first one too many, begins in the middle of it."""
    with tracer.tracing(steps=1) as trace:
        with tracer.span("train_step"):
            thread = threading.Thread(target=lambda: tracer.span("train_step").__enter__())
            thread.start()
            thread.join()
            tracer.mark("still told")
        assert tracer.is_tracing()
        with tracer.span("train_step"):
            assert not tracer.is_tracing()
    assert [each.step for each in trace.events] == ["still told", "train_step"]
    assert len(trace.whole_steps) == 1


def test_a_window_of_steps():
    with tracer.tracing(skip=2, steps=2) as trace:
        for number in range(6):
            assert tracer.is_tracing() == (number < 5)  # the step behind the last one takes the flag down
            with tracer.span("train_step"), tracer.span("forward", number):
                pass
            tracer.mark("behind", number)
    assert [each.rank for each in trace.events if each.step == "forward"] == [2, 3]
    assert [each.rank for each in trace.events if each.step == "behind"] == [2, 3]
    assert not tracer.is_tracing()


def test_a_step_inside_another_is_none_of_its_own():
    """A wrapper inside a wrapper; the inner ones run in the outer one's threads."""
    inner = mgpu_core.DataParallel(torch.nn.Linear(2, 2), ["cpu"] * 2)
    outer = mgpu_core.DataParallel(torch.nn.Sequential(inner), ["cpu"] * 2)
    with tracer.tracing(skip=1, steps=1) as trace:
        for _ in range(3):
            outer(torch.ones(4, 2))
    heads = [
        each
        for each in of(trace, Span, "data_parallel")
        if each.thread == max(of(trace, Span, "gather"), key=lambda e: e.end_ns).thread
    ]
    assert len(heads) == 1
    assert len(of(trace, Span, "data_parallel")) == 3


def test_names_and_recordings_end_each_by_itself():
    """In whatever order: neither brings the other back, or takes it away."""

    class Label:
        def __init__(self, name):
            seen.append(name)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    seen: list[str] = []
    labels, recorded = tracer.labelled(Label), tracer.tracing()
    recorded.__enter__()
    labels.__enter__()
    recorded.__exit__(None, None, None)
    assert not tracer.is_tracing()
    with tracer.span("still named"):
        pass
    labels.__exit__(None, None, None)
    assert seen == ["mgpu still named"]
    assert tracer.span("nobody") is tracer.span("looks")

    with tracer.labelled(Label), tracer.tracing(steps=1):
        for _ in range(2):
            with tracer.span("train_step"):
                pass
        assert not tracer.is_tracing()
        with tracer.span("named behind the recording"):
            pass
    assert seen[-1] == "mgpu named behind the recording"
    with tracer.tracing(steps=1), tracer.labelled(Label):
        for _ in range(2):
            with tracer.span("train_step"):
                pass
    assert not tracer.is_tracing()


def test_no_hook_stays_on_the_users_leaves():
    leaves = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]
    with tracer.tracing():
        mgpu_core.gather(leaves, "cpu").sum().backward()
    assert all(not leaf._backward_hooks for leaf in leaves)


def test_one_recording_at_a_time():
    with tracer.tracing(), pytest.raises(RuntimeError, match="already on"), tracer.tracing():
        pass
    assert not tracer.is_tracing()


def test_a_recording_ends_with_an_error():
    with pytest.raises(KeyError), tracer.tracing() as trace, tracer.span("step"):
        raise KeyError
    assert [each.step for each in trace.events] == ["step"]
    assert not tracer.is_tracing()


def test_times_of_devices_come_from_their_clock():
    """Asked for at both ends of a span, and read only when the recording is over."""

    class Clock:
        def __init__(self):
            self.marks, self.read = 0, 0

        def mark(self, device):
            self.marks += 1
            return self.marks

        def ns(self, mark):
            assert not tracer.is_tracing()
            self.read += 1
            return mark * 1000

    clock = Clock()
    with tracer.tracing(clock) as trace:
        with tracer.span("on the device", 1, torch.device("cpu")):
            tracer.mark("between", 1, torch.device("cpu"))
        with tracer.span("on the host"):
            pass
        assert clock.read == 0
    mark, on_device, on_host = trace.events
    assert (mark.at_ns, on_device.begin_ns, on_device.end_ns) == (2000, 1000, 3000)
    assert on_device.host_begin_ns < on_device.host_end_ns
    assert (on_host.begin_ns, on_host.end_ns) == (on_host.host_begin_ns, on_host.host_end_ns)


def test_labels_have_names():
    seen = []

    class Label:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(self.name)

        def __exit__(self, *_):
            seen.append("end")

    with tracer.labelled(Label):
        assert not tracer.is_tracing()
        with tracer.span("forward", 2), tracer.span("sum", bucket=1):
            pass
        with tracer.tracing() as trace, tracer.span("both"):
            pass
    assert seen == ["mgpu forward rank 2", "mgpu sum bucket 1", "end", "end", "mgpu both", "end"]
    assert [each.step for each in trace.events] == ["both"]
    assert tracer.span("after") is tracer.span("all")


def test_ctrl_c_while_a_recording_begins(monkeypatch):
    """Or it would be on for the rest of the process."""

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tracer, "_show", interrupted)
        with pytest.raises(KeyboardInterrupt), tracer.tracing():
            raise AssertionError
    with tracer.tracing():
        assert tracer.is_tracing()
    assert not tracer.is_tracing()
