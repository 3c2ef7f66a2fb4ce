"""One suite for every backend: small whole numbers, whose sums are exact in every dtype, on 1, 2, 3 and 8 ranks.

The core's cpu backend and the torch backend stand behind the same functions; the generic one is reached by closing the
gate to the core, or with tensors of the fake accelerator.
"""

import pytest
import torch
from fakes import accelerator
from fakes.nets import cpu

from mgpu_core import _core, comm
from mgpu_core.comm import layout, reductions
from mgpu_core.errors import BackendUnavailable

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]
OPS = ["sum", "avg", "prod", "min", "max"]
ALGORITHMS = [name for name in reductions.ALGORITHMS if name not in reductions.BETWEEN_GPUS]
COUNTS = [0, 1, 5, 127, 4097]
POISON = 99


BACKENDS = ["generic"] if accelerator.is_wanted() and not accelerator.by_the_cuda_backend() else ["core", "generic"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param == "generic":
        monkeypatch.setattr(layout, "streams_of_root", lambda root, ranks: None)
        monkeypatch.setattr(layout, "core_streams", lambda devices: None)
        monkeypatch.setattr(layout, "core_serves", lambda devices: False)
    _core.reset_counters()
    yield request.param
    algorithms = {algorithm for _, algorithm, _ in _core.counters()}
    assert ("generic" in algorithms) == (request.param == "generic") or not algorithms


def inputs(ranks, count, dtype):
    return [((torch.arange(count) + 3 * rank) % 4).to(dtype) for rank in range(ranks)]


def expected(parts, op):
    table = torch.stack(parts).to(torch.float64)
    total = {"sum": table.sum, "avg": table.sum, "prod": table.prod}.get(op)
    if total is not None:
        result = total(0)
    elif len(table) and table.numel():
        result = table.amin(0) if op == "min" else table.amax(0)
    else:
        result = table[0]
    dtype = parts[0].dtype
    if op == "avg":
        result = result / len(parts)
        if not dtype.is_floating_point:
            result = result.trunc()
    return result.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_all_reduce(backend, ranks, dtype, op):
    for algorithm in ALGORITHMS:
        for count in COUNTS:
            parts = inputs(ranks, count, dtype)
            wanted = expected(parts, op)
            comm.all_reduce(parts, op, algorithm=algorithm)
            for part in parts:
                # An average that is not a whole number is rounded at each hop by ring and tree.
                exact = op != "avg" or not dtype.is_floating_point or algorithm in ("auto", "naive", "direct")
                assert torch.equal(part, wanted) or (not exact and torch.allclose(part, wanted, rtol=1e-2))
                assert torch.equal(part, parts[0])


@pytest.mark.skipif(accelerator.is_wanted(), reason="the torch backend has one algorithm, whatever is asked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
@pytest.mark.parametrize("algorithm", reductions.BETWEEN_GPUS)
def test_what_does_not_work_in_host_memory(algorithm, dtype):
    parts = inputs(2, 5, dtype)
    with pytest.raises(BackendUnavailable, match=f"{algorithm} works between GPUs"):
        comm.all_reduce(parts, algorithm=algorithm)
    assert all(torch.equal(part, kept) for part, kept in zip(parts, inputs(2, 5, dtype), strict=True))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_all_reduce_of_complex_numbers(backend, ranks, dtype):
    parts = [torch.complex(torch.arange(5.0), torch.full((5,), float(rank))).to(dtype) for rank in range(ranks)]
    wanted = sum(part.clone() for part in parts)
    comm.all_reduce(parts)
    assert all(torch.equal(part, wanted) for part in parts)
    with pytest.raises(TypeError, match="complex"):
        comm.all_reduce(parts, "max")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_dtypes_that_torch_adds(dtype):
    parts = inputs(3, 7, dtype)
    wanted = expected(parts, "sum")
    comm.all_reduce(parts)
    assert all(torch.equal(part, wanted) for part in parts)


def test_half_precision_is_rounded_once(backend):
    # 2048 + 1 + 1 in float16: each single addition is lost, the sum in float32 is not.
    parts = [torch.tensor([2048.0], dtype=torch.float16), *(torch.ones(1, dtype=torch.float16) for _ in range(2))]
    assert comm.reduce_add(parts).item() == 2050
    comm.all_reduce(parts)
    assert parts[2].item() == 2050


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_bits_on_every_rank_and_in_every_run(algorithm):
    torch.manual_seed(0)
    start = [torch.randn(70_001) * 10 ** (rank % 5) for rank in range(8)]
    runs = []
    for _ in range(3):
        parts = [part.clone() for part in start]
        comm.all_reduce(parts, algorithm=algorithm)
        assert all(torch.equal(part, parts[0]) for part in parts)
        runs.append(parts[0])
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("algorithm", ["auto", "naive", "direct"])
def test_rank_order(algorithm):
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    comm.all_reduce(parts, algorithm=algorithm)
    assert parts[1].item() == 0.0  # (1e8 + 1) - 1e8 in float32


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
def test_ring_order():
    # Chunk c is added in the order c, c + 1, c + 2: only chunk 1 begins with rank 1.
    parts = [torch.full((3,), value) for value in (1e8, 1.0, -1e8)]
    comm.all_reduce(parts, algorithm="ring")
    assert parts[0].tolist() == [0.0, 0.0, 1.0]


def test_broadcast(backend, ranks):
    for dtype in [*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn]:
        source = (torch.arange(24) % 2).reshape(2, 3, 4).to(dtype)
        copies = comm.broadcast(source, cpu(ranks))
        assert copies[0] is source
        for rank in range(1, ranks):
            assert copies[rank].data_ptr() != source.data_ptr()
            assert torch.equal(copies[rank].view(torch.uint8), source.view(torch.uint8))


def test_broadcast_into(backend):
    source = torch.arange(5)
    outs = [torch.full((5,), POISON) for _ in range(3)]
    assert comm.broadcast(source, out=outs) == tuple(outs)
    assert all(torch.equal(out, source) for out in outs)


def test_broadcast_coalesced(backend, ranks):
    tensors = [torch.arange(3.0), torch.arange(4), torch.zeros(0), torch.arange(6.0).reshape(2, 3).t()]
    for limit in (1, 16, 10**6):
        copies = comm.broadcast_coalesced(tensors, cpu(ranks), limit)
        assert len(copies) == ranks
        for row in copies:
            assert all(torch.equal(one, other) for one, other in zip(row, tensors, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_add(backend, ranks, dtype):
    parts = inputs(ranks, 33, dtype)
    kept = [part.clone() for part in parts]
    total = comm.reduce_add(parts)
    assert torch.equal(total, expected(kept, "sum"))
    assert all(torch.equal(part, before) for part, before in zip(parts, kept, strict=True))
    assert total.data_ptr() not in [part.data_ptr() for part in parts]


def test_reduce_add_coalesced(backend):
    rows = [[torch.full((2, 3), 1.0 + rank), torch.full((5,), rank), torch.zeros(0)] for rank in range(3)]
    totals = comm.reduce_add_coalesced(rows)
    assert torch.equal(totals[0], torch.full((2, 3), 6.0))
    assert torch.equal(totals[1], torch.full((5,), 3))
    assert totals[2].shape == (0,)


def test_reduce_add_of_sparse_tensors():
    parts = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse() * 2]
    total = comm.reduce_add(parts)
    assert total.is_sparse
    assert torch.equal(total.to_dense(), 3 * torch.eye(3))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("rows", [0, 1, 7, 9, 64])
def test_scatter_and_gather(backend, ranks, dim, rows):
    shape = [2, 3, 4]
    shape[dim] = rows
    whole = torch.arange(2 * 3 * 4 * rows // [2, 3, 4][dim]).reshape(shape).contiguous()
    parts = comm.scatter(whole, cpu(ranks), dim=dim)
    sizes = [part.size(dim) for part in parts]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == max(1, min(ranks, rows))
    assert all(part.data_ptr() != whole.data_ptr() or not part.numel() for part in parts)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole.split(sizes, dim), strict=True))
    assert torch.equal(comm.gather(parts, dim), whole)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_tensors_that_are_not_dense(dim):
    whole = torch.arange(4 * 6 * 5).reshape(4, 6, 5)[:, ::2].transpose(0, 1)
    parts = comm.scatter(whole, cpu(3), dim=dim)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole.tensor_split(3, dim), strict=True))
    assert torch.equal(comm.gather([part.transpose(0, 2).clone().transpose(0, 2) for part in parts], dim), whole)
    assert torch.equal(comm.broadcast(whole, cpu(2))[1], whole)
    assert torch.equal(comm.reduce_add([whole, whole.contiguous()]), 2 * whole)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_channels_last_stays_channels_last(backend, dim):
    whole = torch.arange(5 * 6 * 7 * 4.0).reshape(5, 6, 7, 4).to(memory_format=torch.channels_last)
    parts = comm.scatter(whole, cpu(3), dim=dim)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in parts)
    again = comm.gather(parts, dim)
    assert torch.equal(again, whole)
    assert again.stride() == whole.stride()


def test_scatter_sizes_and_out(backend):
    whole = torch.arange(10)
    assert [part.tolist() for part in comm.scatter(whole, cpu(3), [5, 0, 5])] == [
        [0, 1, 2, 3, 4],
        [],
        [5, 6, 7, 8, 9],
    ]
    outs = [torch.full((3,), POISON), torch.full((7,), POISON)]
    comm.scatter(whole, out=outs)
    assert torch.equal(torch.cat(outs), whole)
    out = torch.full((10,), POISON)
    assert comm.gather(outs, out=out) is out
    assert torch.equal(out, whole)


def test_all_gather(backend, ranks):
    parts = [torch.arange(2 * (rank + 1)).reshape(rank + 1, 2) for rank in range(ranks)]
    wanted = torch.cat(parts)
    wholes = comm.all_gather(parts)
    assert len(wholes) == ranks
    assert all(torch.equal(whole, wanted) for whole in wholes)


@pytest.mark.parametrize("op", OPS)
def test_reduce_scatter(backend, ranks, op):
    parts = [part.reshape(-1, 3) for part in inputs(ranks, ranks * 2 * 3, torch.float32)]
    wanted = expected(parts, op).split(2)
    outs = comm.reduce_scatter(parts, op)
    assert all(torch.equal(out, chunk) for out, chunk in zip(outs, wanted, strict=True))


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
def test_counters_say_what_ran():
    _core.reset_counters()
    comm.all_reduce([torch.zeros(8) for _ in range(3)], algorithm="ring")
    comm.reduce_add([torch.zeros(4, dtype=torch.float16) for _ in range(2)])
    assert _core.counters() == {
        **{("all_reduce", "ring", rank): (1, 32) for rank in range(3)},
        **{("reduce", "direct", rank): (1, 8) for rank in range(2)},
    }
