"""pack, unpack, scale_cast, sum_ranks and l2_norm against their plain-torch truths, and what they refuse."""

import itertools

import numpy as np
import pytest
import torch

from mgpu_core import kernels
from mgpu_core.kernels import reference

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.int32, torch.int64, torch.uint8]
PAIRS = list(itertools.product(FLOATING, FLOATING))
OPS = ["sum", "avg", "prod", "min", "max"]
COUNTS = [0, 1, 3, 15, 16, 17, 1000]
POISON = 77


def numbers(count, dtype, start=0):
    """Small whole numbers, behind an element that is not theirs, so that their memory is not aligned."""
    return ((torch.arange(count + 1) + start) % 13).to(dtype)[1:]


@pytest.mark.parametrize(("dtype", "target"), PAIRS)
@pytest.mark.parametrize("scale", [1.0, 0.5, -3.0])
def test_scale_cast(dtype, target, scale):
    for count in COUNTS:
        tensor = numbers(count, dtype)
        made = kernels.scale_cast(tensor, scale, target)
        assert made.dtype == target
        assert torch.equal(made, reference.scale_cast(tensor, scale, target))


def test_scale_cast_rounds_once_and_keeps_the_special_numbers():
    tensor = torch.tensor([2049.0, 2051.0, 1e30, -1e30, float("inf"), 6e-8, -0.0, float("nan")])
    for target in (torch.float16, torch.bfloat16):
        made = kernels.scale_cast(tensor, dtype=target)
        assert torch.equal(made[:-1].view(torch.int16), tensor[:-1].to(target).view(torch.int16))
        assert made[-1].isnan()


def test_scale_cast_in_place():
    tensor = numbers(100, torch.float32).clone()
    wanted = tensor * 2
    assert kernels.scale_cast(tensor, 2.0, out=tensor) is tensor
    assert torch.equal(tensor, wanted)


@pytest.mark.parametrize(("dtype", "target"), PAIRS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_pack_and_unpack(dtype, target, scale):
    tensors = [numbers(count, dtype, start).reshape(1, -1) for start, count in enumerate(COUNTS)]
    flat = kernels.pack(tensors, dtype=target, scale=scale)
    assert torch.equal(flat, reference.pack(tensors, scale, target))
    back = [torch.full_like(tensor, POISON) for tensor in tensors]
    kernels.unpack(flat, back, scale=1 / scale)
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))


@pytest.mark.parametrize("dtype", [*FLOATING, *WHOLE])
def test_pack_moves_any_dtype(dtype):
    tensors = [numbers(count, dtype, start) for start, count in enumerate(COUNTS)]
    out = torch.full((sum(COUNTS),), POISON, dtype=dtype)
    assert kernels.pack(tensors, out=out) is out
    assert torch.equal(out, torch.cat(tensors))


def test_pack_of_large_tensors_is_shared_by_threads():
    tensors = [numbers(300_001, torch.float32), numbers(7, torch.float32), numbers(200_003, torch.float32)]
    flat = kernels.pack(tensors, dtype=torch.float16, scale=2)
    assert torch.equal(flat, (torch.cat(tensors) * 2).half())


@pytest.mark.parametrize("dtype", [*FLOATING, *WHOLE])
@pytest.mark.parametrize("op", OPS)
def test_sum_ranks(dtype, op, ranks):
    for count in COUNTS:
        tensors = [numbers(count, dtype, 5 * rank) for rank in range(ranks)]
        assert torch.equal(kernels.sum_ranks(tensors, op), reference.sum_ranks(tensors, op))


def test_sum_ranks_into_one_of_them():
    tensors = [torch.full((9,), float(rank)) for rank in range(3)]
    kernels.sum_ranks(tensors, out=tensors[1])
    assert torch.equal(tensors[1], torch.full((9,), 3.0))
    assert torch.equal(tensors[2], torch.full((9,), 2.0))


def test_sum_ranks_rounds_once():
    tensors = [torch.tensor([2048.0], dtype=torch.float16), *(torch.ones(1, dtype=torch.float16) for _ in range(2))]
    assert kernels.sum_ranks(tensors).item() == 2050


@pytest.mark.parametrize("dtype", FLOATING)
def test_l2_norm(dtype):
    tensors = [numbers(count, dtype) for count in [*COUNTS, 70_001]]
    norm = kernels.l2_norm(tensors)
    assert norm.shape == ()
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(norm, reference.l2_norm(tensors))  # whole numbers: sums of squares are exact
    assert kernels.l2_norm([torch.empty(0, dtype=dtype)]).item() == 0
    assert kernels.l2_norm([torch.full((3,), 4e18, dtype=torch.float32)]).item() == pytest.approx(4e18 * 3**0.5)


def test_l2_norm_has_the_same_bits_in_every_run():
    torch.manual_seed(0)
    tensors = [torch.randn(count) for count in (200_003, 5, 33_000)]
    assert len({kernels.l2_norm(tensors).item() for _ in range(5)}) == 1


@pytest.mark.cpu_only(
    "says cpu in what it expects, mixes in arrays of numpy, or wants what a device cannot know in time"
)
def test_arrays_of_other_libraries():
    array = np.arange(6, dtype=np.float32)
    assert kernels.pack([array, torch.ones(2)]).tolist() == [0, 1, 2, 3, 4, 5, 1, 1]
    assert kernels.sum_ranks([array, array]).tolist() == [0, 2, 4, 6, 8, 10]
    with pytest.raises(TypeError, match=r"tensors\[1\] must be a tensor or an array"):
        kernels.pack([array, "no"])


def test_writing_tells_autograd():
    source = torch.ones(4)
    outs = [torch.zeros(4), torch.zeros(4), torch.zeros(4)]
    kernels.pack([source], out=outs[0])
    kernels.scale_cast(source, out=outs[1])
    kernels.sum_ranks([source], out=outs[2])
    versions = [out._version for out in outs]
    assert min(versions) > 0
    kernels.unpack(source, outs[:1])
    assert outs[0]._version > versions[0]


@pytest.mark.cpu_only(
    "says cpu in what it expects, mixes in arrays of numpy, or wants what a device cannot know in time"
)
def test_refusals():
    one = torch.ones(4)
    with pytest.raises(ValueError, match="tensors is empty"):
        kernels.pack([])
    with pytest.raises(TypeError, match="tensors is a sequence of tensors, not Tensor"):
        kernels.pack(one)
    with pytest.raises(ValueError, match=r"tensors\[1\] is torch.float16 on cpu"):
        kernels.pack([one, one.half()])
    with pytest.raises(ValueError, match=r"tensors\[0\] must be contiguous"):
        kernels.pack([torch.ones(2, 3).t()])
    with pytest.raises(TypeError, match="pack with a scale or a cast works on float16"):
        kernels.pack([one.int()], scale=2)
    with pytest.raises(TypeError, match=r"not on torch\.bool"):
        kernels.pack([one.bool()])
    with pytest.raises(ValueError, match=r"out must be contiguous \(4,\)"):
        kernels.pack([one], out=torch.ones(5))
    whole = torch.ones(6)
    with pytest.raises(ValueError, match="share memory"):
        kernels.pack([whole[1:5]], out=whole[:4])
    with pytest.raises(ValueError, match=r"flat must be \(8,\)"):
        kernels.unpack(torch.ones(7), [one, one.clone()])
    with pytest.raises(ValueError, match=r"outs\[0\] and outs\[1\] share memory"):
        kernels.unpack(torch.ones(8), [one, one])
    with pytest.raises(ValueError, match="op must be one of sum"):
        kernels.sum_ranks([one], "mean")
    with pytest.raises(TypeError, match="sum_ranks works on"):
        kernels.sum_ranks([one.bool()])
    with pytest.raises(ValueError, match=r"tensors\[1\] must be \(4,\)"):
        kernels.sum_ranks([one, torch.ones(5)])
    with pytest.raises(TypeError, match="scale_cast works on"):
        kernels.scale_cast(one.int())
    with pytest.raises(TypeError, match="l2_norm works on"):
        kernels.l2_norm([one.int()])
    with pytest.raises(ValueError, match="leaf that requires grad"):
        kernels.scale_cast(one, out=torch.ones(4, requires_grad=True))
    with pytest.raises(TypeError, match="meta device"):
        kernels.pack([one.to("meta")])


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_norm_of_the_same_tensors_again_and_again(dtype):
    tensors = [torch.zeros(count, dtype=dtype) for count in (5, 300, 0)]
    norm = kernels.FlatNorm(tensors)
    assert norm.compute().item() == 0
    tensors[0][2] = 3
    tensors[1][299] = 4
    assert norm.compute().item() == 5
    assert norm.compute().dtype == kernels.l2_norm(tensors).dtype
    tensors[1][0] = float("inf")
    assert norm.compute().item() == float("inf")


def test_what_has_no_norm():
    with pytest.raises(TypeError, match="l2_norm"):
        kernels.FlatNorm([torch.zeros(3, dtype=torch.int32)])
