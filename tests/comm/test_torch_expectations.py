"""Expectations of torch's own tests of torch.cuda.comm."""

import pytest
import torch
from fakes.two_devices import HOME, OTHER, TEAM, rows

from mgpu_core import comm


@pytest.mark.parametrize("source", ["cpu", HOME], ids=["host", "home"])
def test_comm_broadcast(source):
    x = rows(device=source)
    results = comm.broadcast(x, TEAM)
    assert [each.device for each in results] == [HOME, OTHER]
    assert all(torch.equal(each, x) for each in results)
    if x.device == HOME:
        assert results[0].data_ptr() == x.data_ptr()
    outs = [torch.empty_like(x, device=device) for device in TEAM]
    for given in (outs, [x.to(HOME), outs[1]]):
        results = comm.broadcast(x, out=given)
        assert all(one is other for one, other in zip(results, given, strict=True))
        assert all(torch.equal(each, x) for each in results)
    with pytest.raises(RuntimeError, match="Exactly one of 'devices' and 'out'"):
        comm.broadcast(x, TEAM, out=outs)
    # Torch asks for CUDA tensors; here any device will do.  Its RuntimeError for a wrong shape is a ValueError.
    assert torch.equal(comm.broadcast(x, out=[x.to(HOME), torch.empty_like(x, device="cpu")])[1], x)
    with pytest.raises(ValueError, match="rank 1"):
        comm.broadcast(x, out=[outs[0], outs[1].unsqueeze(0)])


def sparse(shape, dtype, device=HOME):
    dense = torch.arange(torch.Size(shape).numel()).view(shape) % 3
    return dense.to(device, dtype).to_sparse()


MANY = {
    "dense": lambda: [
        rows(1, dtype=torch.int64),
        rows(1),
        rows(2, dtype=torch.int32),
        rows(1, dtype=torch.int64),
        rows(1),
    ],
    "empty": lambda: [torch.tensor([], dtype=torch.uint8, device=HOME), rows(), rows(dtype=torch.float32)],
    "sparse": lambda: [
        sparse((2, 3), torch.float64),
        rows(1, dtype=torch.int64),
        sparse((3, 3), torch.int64),
        rows(1),
        sparse((2, 7), torch.float32),
        *([sparse((2, 7), torch.float32).to_sparse_csr()] if HOME.type == "cpu" else []),  # the fake has no such
    ],
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("buffer_size", [1, 60, 10**7])
def test_comm_broadcast_coalesced(kind, buffer_size):
    tensors = MANY[kind]()
    copies = comm.broadcast_coalesced(tensors, TEAM, buffer_size=buffer_size)
    assert all(one is other for one, other in zip(copies[0], tensors, strict=True)), (
        "rank 0 gets the tensors themselves"
    )
    for copy, tensor in zip(copies[1], tensors, strict=True):
        assert copy.device == OTHER
        assert (copy.dtype, copy.layout) == (tensor.dtype, tensor.layout)
        assert torch.equal(copy.to_dense(), tensor.to_dense())
    check_own_versions(copies[1])


def check_own_versions(tensors):
    """Each has a version counter of its own: writing to one does not change the others'."""
    versions = [tensor._version for tensor in tensors]
    for version, tensor in zip(versions, tensors, strict=True):
        assert tensor._version == version
        tensor.zero_()
        assert tensor._version == version + 1


def test_comm_reduce_add():
    result = comm.reduce_add((rows(device=HOME), rows(device=OTHER) * 2))
    assert result.device == HOME
    assert torch.equal(result, rows() * 3)


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("buffer_size", [1, 60, 10**7])
def test_comm_reduce_add_coalesced(kind, buffer_size):
    tensors = MANY[kind]()
    results = comm.reduce_add_coalesced([tensors, [tensor.to(OTHER) for tensor in tensors]], buffer_size=buffer_size)
    for result, tensor in zip(results, tensors, strict=True):
        assert (result.device, result.dtype, result.layout) == (HOME, tensor.dtype, tensor.layout)
        assert torch.equal(result.to_dense(), tensor.to_dense() * 2)
    check_own_versions(results)


@pytest.mark.parametrize("source", ["cpu", HOME], ids=["host", "home"])
@pytest.mark.parametrize(("dim", "sizes"), [(0, None), (1, None), (-2, None), (0, (2, 4))], ids=str)
def test_comm_scatter(source, dim, sizes):
    x = rows(6, device=source, columns=4)
    parts = comm.scatter(x, TEAM, sizes, dim)
    wanted = x.split(sizes or x.size(dim) // 2, dim)
    assert [part.device for part in parts] == [HOME, OTHER]
    assert all(torch.equal(one, other) for one, other in zip(parts, wanted, strict=True))
    # Torch gives a view where the chunk is on the tensor's device already; ours are fresh, so that a module that writes
    # to its input leaves the caller's tensor alone.
    assert all(part.data_ptr() != x.data_ptr() for part in parts)
    out = [torch.empty_like(part) for part in parts]
    result = comm.scatter(x, dim=dim, out=out)
    assert all(one is other for one, other in zip(result, out, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(result, wanted, strict=True))


def test_comm_scatter_mistakes():
    x = rows(6)
    out = list(comm.scatter(x, TEAM))
    with pytest.raises(ValueError, match="chunk_sizes must be 3 sizes"):
        comm.scatter(x, [HOME] * 3, chunk_sizes=(2, 4))
    with pytest.raises(RuntimeError, match="'devices' must not be specified"):
        comm.scatter(x, TEAM, out=out)
    with pytest.raises(ValueError, match="devices is empty"):
        comm.scatter(x, ())
    with pytest.raises(ValueError, match="out is empty"):
        comm.scatter(x, out=[])
    with pytest.raises(ValueError, match=r"out\[0\]"):
        comm.scatter(x, out=[out[0].unsqueeze(0), out[1]])
    with pytest.raises(ValueError, match="5 rows along dimension 0 together, wanted 6"):
        comm.scatter(x, out=[out[0][1:], out[1]])


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("target", [None, HOME, OTHER, "cpu"], ids=str)
def test_comm_gather(dim, target):
    x, y = rows(2, device=HOME), rows(2, device=OTHER) + 1
    wanted = torch.cat([x.cpu(), y.cpu()], dim)
    result = comm.gather((x, y), dim, destination=target)
    # Without a destination torch takes the current device, ours the first tensor's.
    assert result.device == (HOME if target is None else torch.device(target))
    assert torch.equal(result, wanted)
    out = torch.empty_like(result)
    assert comm.gather((x, y), dim, out=out) is out
    assert torch.equal(out, wanted)


def test_comm_gather_mistakes():
    x, y = rows(2, device=HOME), rows(2, device=OTHER)
    with pytest.raises(RuntimeError, match="'destination' must not be specified"):
        comm.gather((x, y), 0, destination="cpu", out=torch.empty(4, 3, dtype=torch.float64, device="cpu"))
    with pytest.raises(ValueError, match="tensors is empty"):
        comm.gather(())
    assert torch.equal(comm.gather((x.cpu(), y)), torch.cat([x.cpu(), y.cpu()]))  # torch asks for CUDA tensors
    for bad in (y.unsqueeze(0), y[:, 1:]):
        with pytest.raises(ValueError, match=r"tensors\[1\]"):
            comm.gather((x, bad))


def test_channels_last_goes_through_comm():
    x = torch.ones(10, 3, 4, 4, device="cpu").contiguous(memory_format=torch.channels_last)
    parts = comm.scatter(x, TEAM, None, 0)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in parts)
    assert not any(part.is_contiguous() for part in parts)
    assert comm.gather(parts).is_contiguous(memory_format=torch.channels_last)
