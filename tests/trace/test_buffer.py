"""A recording holds every step of a pass, with its ranks, rows, bytes and hops."""

import pytest
import torch
from fakes.traces import names, of

import mgpu_core
from mgpu_core import comm
from mgpu_core.trace import tracer
from mgpu_core.trace.events import BETWEEN, ROOT, Collective, Contents, Cut, Mark, Span

pytestmark = pytest.mark.several_ranks


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


@pytest.mark.parametrize(("step", "route"), [(1, "direct"), (2, "generic")])
def test_every_collective_tells_its_route(step, route):
    parts = [torch.ones(4, 6)[:, ::step] for _ in range(2)]
    with tracer.tracing() as trace:
        comm.scatter(parts[0], ["cpu"] * 2)
        comm.gather(parts)
        comm.all_gather(parts)
        comm.reduce_scatter(parts)
    assert [each.route for each in of(trace, Collective)] == [route] * 4


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


def test_synchronised_layers_tell_their_sums(ranks):
    """Forward: the sum, and of the squares; backward: two again.  One number of 4 bytes per channel and rank."""
    net = mgpu_core.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5)))
    model = mgpu_core.DataParallel(net, ["cpu"] * ranks)
    with tracer.tracing() as trace:
        model(torch.randn(16, 4)).square().sum().backward()
    sums = of(trace, Collective, "all_reduce")
    assert len(sums) == 4
    for each in sums:
        assert (each.route, each.nbytes) == ("direct", (20,) * ranks)
        everybody = tuple((rank, 0, 0) for rank in range(ranks))  # reads all, and has the sum
        assert [(hop.sums, hop.nbytes, hop.sources, hop.targets) for hop in each.hops] == [(True, 20, *[everybody] * 2)]
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
