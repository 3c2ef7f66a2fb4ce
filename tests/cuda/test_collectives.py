"""The collectives and transfers of ranks on one GPU: each algorithm, by the cuda backend and not by torch's copies."""

import pytest
import torch

from mgpu_core import _core, comm
from mgpu_core.errors import Error

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]
COUNTS = [1, 5, 4097]


@pytest.fixture(autouse=True)
def by_the_cuda_backend(gpu):
    _core.reset_counters()
    yield
    assert "generic" not in {algorithm for _, algorithm, _ in _core.counters()}
    assert _core.counters()


def parts_of(ranks, count, dtype, gpu):
    return [((torch.arange(count) + 3 * rank) % 4).to(dtype).to(gpu) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["auto", "naive", "direct", "ring", "tree"])
@pytest.mark.parametrize("merge", [True, False])
def test_all_reduce(gpu, ranks, dtype, algorithm, merge):
    for op in ("sum", "max", "prod"):
        for count in COUNTS:
            parts = parts_of(ranks, count, dtype, gpu)
            host = [part.cpu() for part in parts]
            comm.all_reduce(host, op)
            comm.all_reduce(parts, op, algorithm=algorithm, merge_shared_devices=merge)
            assert all(torch.equal(part.cpu(), host[0]) for part in parts)


class Pushing:
    """A team of push whose ranks share a GPU, where there is room for all of their kernels, each on its own stream."""

    def __init__(self, ranks, gpu):
        self.torch_streams = [torch.cuda.Stream(gpu) for _ in range(ranks)]
        self.streams = [_core.Stream("cuda", 0, stream.cuda_stream) for stream in self.torch_streams]
        nbytes = _core.push_memory_nbytes(ranks)
        self.memory = [torch.zeros(nbytes, dtype=torch.uint8, device=gpu) for _ in range(ranks)]
        torch.cuda.synchronize()
        self.team = _core.PushTeam([tensor.data_ptr() for tensor in self.memory], self.streams)

    def all_reduce(self, parts, op="sum", limit_seconds=60.0):
        pointers = [part.data_ptr() for part in parts]
        dtype = str(parts[0].dtype).removeprefix("torch.")
        self.team.all_reduce(pointers, pointers, parts[0].numel(), dtype, op, self.streams, limit_seconds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_push_between_streams_of_one_gpu(gpu, ranks, dtype):
    pushing = Pushing(ranks, gpu)
    for op in ("sum", "avg", "max", "prod"):
        for count in (*COUNTS, 2**18 // dtype.itemsize, 300_000):
            torch.manual_seed(count)
            parts = [(torch.randn(count, device=gpu) * 9).to(dtype) for _ in range(ranks)]
            summed = [part.clone() for part in parts]
            comm.all_reduce(summed, op, algorithm="direct")
            torch.cuda.synchronize()
            pushing.all_reduce(parts, op)
            torch.cuda.synchronize()
            assert all(torch.equal(part, summed[0]) for part in parts)
    pushing.team.check()


def test_push_goes_on_thousands_of_times(gpu, ranks):
    pushing = Pushing(ranks, gpu)
    parts = [torch.full((1000,), float(rank == 0), device=gpu) for rank in range(ranks)]
    torch.cuda.synchronize()
    for turn in range(3000):
        pushing.all_reduce(parts, "max" if turn % 2 else "avg" if turn % 3 else "sum")
        if turn % 2 == 0:
            with torch.cuda.stream(pushing.torch_streams[turn % ranks]):
                parts[turn % ranks].add_(1).sub_(1).clamp_(0, 1)
    torch.cuda.synchronize()
    pushing.team.check()
    assert all(torch.equal(part, parts[0]) for part in parts)


def test_push_gives_up_a_rank_that_is_too_late(gpu):
    pushing = Pushing(2, gpu)
    parts = [torch.ones(100, device=gpu) for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(pushing.torch_streams[1]):
        torch.cuda._sleep(4_000_000_000)  # two seconds
    pushing.all_reduce(parts, limit_seconds=0.2)
    pushing.torch_streams[0].synchronize()
    assert bool(parts[0].isnan().all())
    with pytest.raises(Error, match="rank 0 gave up an all-reduce by push: rank 1 did not come"):
        pushing.all_reduce(parts)
    torch.cuda.synchronize()


def test_work_before_and_after_is_in_order(gpu, ranks):
    parts = [torch.zeros(1 << 20, device=gpu) for _ in range(ranks)]
    for _ in range(20):
        torch.cuda._sleep(1_000_000)
        for part in parts:
            part.fill_(1)
        comm.all_reduce(parts)
        for part in parts:
            part.div_(ranks)
    assert all(part.eq(1).all() for part in parts)


def test_broadcast_and_reduce(gpu, ranks):
    tensors = [torch.arange(3.0, device=gpu), torch.arange(70_000, device=gpu)]
    copies = comm.broadcast_coalesced(tensors, [gpu] * ranks)
    assert all(torch.equal(one, other) for row in copies for one, other in zip(row, tensors, strict=True))
    totals = comm.reduce_add_coalesced(copies)
    assert all(torch.equal(total, tensor * ranks) for total, tensor in zip(totals, tensors, strict=True))


@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_scatter_and_gather(gpu, ranks, source, dim):
    whole = torch.arange(9 * 8 * 7 * 64).reshape(9, 8, 7 * 64).to(source)
    parts = comm.scatter(whole, [gpu] * ranks, dim=dim)
    sizes = [part.size(dim) for part in parts]
    wanted = whole.split(sizes, dim)
    assert len(parts) == ranks
    whole = whole.clone()  # what was scattered is kept; nothing below may depend on it
    assert all(torch.equal(part.cpu(), piece.cpu()) for part, piece in zip(parts, wanted, strict=True))
    for destination in ("cpu", gpu):
        assert torch.equal(comm.gather(parts, dim, destination).cpu(), whole.cpu())


def test_a_host_tensor_may_be_freed_when_scatter_returns(gpu, ranks):
    for value in range(30):
        whole = torch.full((ranks * 100_000,), float(value))
        parts = comm.scatter(whole, [gpu] * ranks)
        whole.fill_(-1)
        assert all(part.eq(value).all() for part in parts)


def test_all_gather_and_reduce_scatter(gpu, ranks):
    parts = [torch.arange(2 * (rank + 1), device=gpu).reshape(rank + 1, 2) for rank in range(ranks)]
    assert all(torch.equal(whole, torch.cat(parts)) for whole in comm.all_gather(parts))
    parts = [torch.arange(ranks * 6.0, device=gpu).reshape(-1, 3) + rank for rank in range(ranks)]
    wanted = sum(parts).split(2)
    assert all(torch.equal(out, piece) for out, piece in zip(comm.reduce_scatter(parts), wanted, strict=True))
