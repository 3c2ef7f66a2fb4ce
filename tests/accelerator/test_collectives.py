"""``mgpu_core.comm`` on the torch backend: fake devices, several ranks on one, and teams with the CPU among them."""

import pytest
import torch
from fakes.accelerator import TEAMS
from fakes.tensors import devices_of

from mgpu_core import _core, comm
from mgpu_core.comm import dispatch, reductions

pytestmark = pytest.mark.parametrize("team", TEAMS, ids="-".join)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]
MOVED = [*DTYPES, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def counted():
    _core.reset_counters()


def inputs(team, count=5, dtype=torch.float32):
    """A tensor per rank, on its device: small whole numbers, no two ranks' alike."""
    return [
        ((torch.arange(count, device="cpu") + rank) % 4 + 1).to(dtype).to(device) for rank, device in enumerate(team)
    ]


def lists(tensors):
    return [tensor.tolist() for tensor in tensors]


def expected(parts, op):
    table = torch.stack([part.cpu() for part in parts]).double()
    total = {"sum": table.sum, "avg": table.sum, "prod": table.prod}.get(op, getattr(table, f"a{op}", None))(0)
    if op == "avg":
        total = total / len(parts)
        total = total if parts[0].is_floating_point() else total.trunc()
    return total.to(parts[0].dtype).tolist()


def moved(operation, nbytes):
    """What the counters say of one call in which each rank moved that many bytes; ``None`` for a rank that did not."""
    return {(operation, "generic", rank): (1, n) for rank, n in enumerate(nbytes) if n is not None}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", reductions.OPS)
def test_all_reduce(team, op, dtype):
    for algorithm in reductions.ALGORITHMS:
        parts = inputs(team, dtype=dtype)
        wanted = expected(parts, op)
        _core.reset_counters()
        comm.all_reduce(parts, op, algorithm=algorithm)
        assert lists(parts) == [wanted] * len(team)
        assert devices_of(parts) == team
        assert _core.counters() == moved("all_reduce", [parts[0].nbytes] * len(team))


@pytest.mark.parametrize("op", reductions.OPS)
def test_reduce_scatter(team, op):
    parts = inputs(team, 2 * len(team))
    wanted = expected(parts, op)
    outs = comm.reduce_scatter(parts, op)
    assert devices_of(outs) == team
    assert lists(outs) == [wanted[2 * rank : 2 * rank + 2] for rank in range(len(team))]
    assert _core.counters() == moved("reduce_scatter", [8] * len(team))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (6, 0)], ids=str)
def test_nothing_at_all(team, shape):
    """Tensors without elements go every way that others go."""
    rows, *columns = shape
    make = lambda count: [torch.empty(count, *columns, device=device) for device in team]  # noqa: E731
    comm.all_reduce(make(rows))
    assert [each.shape for each in comm.reduce_scatter(make(rows * len(team)))] == [shape] * len(team)
    assert [each.shape for each in comm.all_gather(make(rows))] == [(rows * len(team), *columns)] * len(team)
    assert [each.shape for each in comm.broadcast(make(rows)[0], team)] == [shape] * len(team)
    assert comm.reduce_add(make(rows)).shape == shape


def test_all_gather_of_uneven_parts(team):
    parts = [torch.full((rank + 1, 2), float(rank), device=device) for rank, device in enumerate(team)]
    wholes = comm.all_gather(parts)
    assert devices_of(wholes) == team
    assert lists(wholes) == [[[rank] * 2 for rank in range(len(team)) for _ in range(rank + 1)]] * len(team)
    assert _core.counters() == moved("all_gather", [part.nbytes for part in parts])


@pytest.mark.parametrize("dtype", MOVED)
def test_broadcast(team, dtype):
    source = (torch.arange(6, device="cpu") % 2).reshape(2, 3).to(dtype).to(team[0])
    copies = comm.broadcast(source, team)
    assert copies[0] is source
    assert devices_of(copies) == team
    assert all(copy.view(torch.uint8).tolist() == source.view(torch.uint8).tolist() for copy in copies)
    assert len({copy.data_ptr() for copy in copies}) == len(team)
    assert _core.counters() == moved("broadcast", [None] + [source.nbytes] * (len(team) - 1))


def test_broadcast_from_elsewhere_and_into(team):
    source = torch.arange(4.0, device="fake:3")
    copies = comm.broadcast(source, team)
    outs = [torch.full((4,), 99.0, device=device) for device in team]
    assert comm.broadcast(source, out=outs) == tuple(outs)
    assert lists(copies) == lists(outs) == [[0, 1, 2, 3]] * len(team)
    assert devices_of(copies) == devices_of(outs) == team


def test_a_source_in_place_and_a_copy_of_another_are_two_messages(team):
    sources = [torch.full((3,), float(value), device=team[0]) for value in (1, 2)]
    copies = [[sources[0]], [torch.zeros(3, device=team[0])]]
    dispatch.broadcast_into(sources, copies)
    assert copies[1][0].tolist() == [2, 2, 2]
    assert list(_core.counters().values()) == [(1, 12)]


def test_broadcast_coalesced(team):
    tensors = [torch.arange(3.0), torch.arange(4), torch.zeros(0), torch.arange(6.0).reshape(2, 3).t()]
    tensors = [tensor.to(team[0]) for tensor in tensors]
    for limit in (1, 16, 10**6):
        copies = comm.broadcast_coalesced(tensors, team, limit)
        assert [devices_of(row) for row in copies] == [[device] * 4 for device in team]
        assert [lists(row) for row in copies] == [lists(tensors)] * len(team)


@pytest.mark.parametrize("destination", [None, "cpu", "fake:0", "fake:3", 2])
def test_reduce_add(team, destination):
    parts = inputs(team)
    total = comm.reduce_add(parts, destination)
    wanted = torch.device(f"fake:{destination}" if isinstance(destination, int) else destination or team[0])
    assert total.device == wanted
    assert total.tolist() == expected(parts, "sum")
    assert total.data_ptr() not in [part.data_ptr() for part in parts]
    assert _core.counters() == moved("reduce", [20] * len(team))


def test_half_precision_is_added_in_float32(team):
    parts = [torch.tensor([2048.0 if rank == 0 else 1.0], dtype=torch.float16, device=d) for rank, d in enumerate(team)]
    assert comm.reduce_add(parts).item() == torch.tensor(2048.0 + len(team) - 1).half().item()


def test_reduce_add_of_sparse_tensors(team):
    parts = [torch.eye(3, device=device).to_sparse() * (rank + 1) for rank, device in enumerate(team)]
    total = comm.reduce_add(parts)
    assert total.layout is torch.sparse_coo
    assert str(total.device) == team[0]
    factor = sum(range(len(team) + 1))
    assert total.to_dense().tolist() == (torch.eye(3, device="cpu") * factor).tolist()


def test_reduce_add_coalesced(team):
    rows = [[part, part.int(), part.double().reshape(5, 1)] for part in inputs(team)]
    for limit in (1, 10**6):
        totals = comm.reduce_add_coalesced(rows, buffer_size=limit)
        assert devices_of(totals) == [team[0]] * 3
        assert lists(totals) == [expected([row[i] for row in rows], "sum") for i in range(3)]


@pytest.mark.parametrize("source", ["cpu", "fake:0", "fake:2"])
@pytest.mark.parametrize("dim", [0, 1])
def test_scatter_and_gather(team, dim, source):
    whole = torch.arange(99.0, device=source).reshape(9, 11)
    parts = comm.scatter(whole, team, dim=dim)
    assert devices_of(parts) == team
    assert lists(parts) == lists(whole.tensor_split(len(team), dim))
    assert not {part.data_ptr() for part in parts} & {whole.data_ptr()}
    assert _core.counters() == moved("scatter", [part.nbytes for part in parts])
    _core.reset_counters()
    for destination in ("cpu", "fake:1"):
        again = comm.gather(parts, dim, destination)
        assert str(again.device) == destination
        assert again.tolist() == whole.tolist()
    assert _core.counters() == {key: (2, 2 * n) for key, (_, n) in moved("gather", [p.nbytes for p in parts]).items()}


def test_scatter_and_gather_into(team):
    whole = torch.arange(20.0, device="fake:0").reshape(10, 2)
    sizes = [0] * (len(team) - 1) + [10]
    outs = [torch.full((size, 2), 99.0, device=device) for size, device in zip(sizes, team, strict=True)]
    comm.scatter(whole, out=outs)
    assert lists(outs) == lists(whole.split(sizes))
    for device in ("cpu", "fake:3"):
        back = torch.full((10, 2), 99.0, device=device)
        assert comm.gather(outs, out=back) is back
        assert back.tolist() == whole.tolist()


def test_nothing_is_written_when_an_argument_is_wrong(team):
    parts = inputs(team)
    before = lists(parts)
    for wrong in (lambda: comm.all_reduce(parts, "median"), lambda: comm.all_reduce([*parts, parts[0][:3].clone()])):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError, match="device fake:4 does not exist: torch sees 4 fake devices here"):
        comm.scatter(parts[0], [*team, "fake:4"])
    assert lists(parts) == before
    assert _core.counters() == {}


def test_writes_are_told_to_autograd(team):
    parts = inputs(team)
    leaves = [torch.ones(5, device=device, requires_grad=True) for device in team]
    losses = [(part * leaf).sum() for part, leaf in zip(parts, leaves, strict=True)]
    comm.all_reduce(parts)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
