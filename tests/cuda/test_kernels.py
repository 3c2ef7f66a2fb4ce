"""The kernels on a GPU against their plain-torch truths, misaligned, beside other libraries' arrays, in a graph."""

import itertools
from typing import Any

import pytest
import torch

from mgpu_core import _core, kernels
from mgpu_core.kernels import reference

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.int32, torch.int64, torch.uint8]
PAIRS = list(itertools.product(FLOATING, FLOATING))
COUNTS = [0, 1, 7, 16, 1000, 70_001]


def numbers(count, dtype, gpu, start=0):
    """Small whole numbers, behind an element that is not theirs."""
    return ((torch.arange(count + 1, device=gpu) + start) % 13).to(dtype)[1:]


@pytest.mark.parametrize(("dtype", "target"), PAIRS)
def test_scale_cast_pack_and_unpack(gpu, dtype, target):
    tensors = [numbers(count, dtype, gpu, start) for start, count in enumerate(COUNTS)]
    for scale in (1.0, -0.5):
        for tensor in tensors:
            assert torch.equal(kernels.scale_cast(tensor, scale, target), reference.scale_cast(tensor, scale, target))
        flat = kernels.pack(tensors, dtype=target, scale=scale)
        assert torch.equal(flat, reference.pack(tensors, scale, target))
        back = [torch.full_like(tensor, 77) for tensor in tensors]
        kernels.unpack(flat, back, scale=1 / scale)
        assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))


def test_many_tensors(gpu):
    tensors = [numbers(1 + position % 300, torch.float32, gpu, position) for position in range(5000)]
    assert torch.equal(kernels.pack(tensors), torch.cat(tensors))


@pytest.mark.parametrize("dtype", [*FLOATING, *WHOLE])
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_sum_ranks(gpu, dtype, op, count):
    for elements in COUNTS:
        tensors = [numbers(elements, dtype, gpu, 5 * rank) for rank in range(count)]
        assert torch.equal(kernels.sum_ranks(tensors, op), reference.sum_ranks(tensors, op))


@pytest.mark.parametrize("dtype", FLOATING)
def test_l2_norm(gpu, dtype):
    tensors = [numbers(count, dtype, gpu) for count in COUNTS]
    assert torch.equal(kernels.l2_norm(tensors), reference.l2_norm(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (1, 28, 28), (3000,)])
def test_gather_rows(gpu, dtype, shape):
    rows = torch.randint(0, 256, (11, *shape), dtype=torch.uint8, device=gpu)
    index = torch.randint(0, 11, (700,), device=gpu)
    made = kernels.gather_rows(rows, index, scale=0.31, shift=-1.5, dtype=dtype)
    assert torch.equal(made, reference.gather_rows(rows, index, scale=0.31, shift=-1.5, dtype=dtype))
    wrong = kernels.gather_rows(rows, torch.tensor([0, 11, -1], device=gpu))
    assert wrong[0].isfinite().all()
    assert wrong[1:].isnan().all()
    empty = torch.full((2, *shape), 7.0, dtype=dtype, device=gpu)
    kernels.gather_rows(rows[:0], torch.tensor([0, 1], device=gpu), dtype=dtype, out=empty)
    assert empty.isnan().all()


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_optimizers_are_the_hosts(gpu, name, dtype):
    """As near as can be: both do the same operations in the same order."""
    counts = [5, 0, 64, 1, 30_001]
    results = []
    for device in ("cpu", gpu):
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(sum(counts), generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
        parameters, gradients = (tensor.to(device) for tensor in made)
        states = [torch.zeros_like(parameters) for _ in range(2)]
        segments = kernels.segment_table(counts, groups=[0, 1, 1, 0, 1], device=device)
        segments[2, 4] = 0
        scalars: Any = {
            "clip": torch.tensor(0.125, dtype=torch.float64, device=device),
            "found_inf": torch.tensor(0.0, device=device),
        }
        for _ in range(3):
            if name == "sgd":
                groups = kernels.sgd_groups({"lr": 0.1}, {"lr": 0.2, "momentum": 0.9, "nesterov": 1}, device=device)
                kernels.sgd(parameters, gradients, states[0], segments, groups, **scalars)
            else:
                groups = kernels.adam_groups({"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.2}, device=device)
                getattr(kernels, name)(parameters, gradients, *states, segments, groups, **scalars)
        results.append([tensor.cpu() for tensor in (parameters, *states, segments)])
    for one, other in zip(*results, strict=True):
        # The device's pow may differ from the host's in its last digit, and a first step's correction makes more of it.
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_step_in_a_graph_sees_new_numbers(gpu):
    parameters, gradients = torch.zeros(100, device=gpu), torch.ones(100, device=gpu)
    segments = kernels.segment_table([100], device=gpu)
    groups = kernels.sgd_groups({"lr": 1.0}, device=gpu)
    clip = torch.ones((), dtype=torch.float64, device=gpu)
    kernels.sgd(parameters, gradients, None, segments, groups, clip=clip)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sgd(parameters, gradients, None, segments, groups, clip=clip)
    clip.fill_(10)
    graph.replay()
    groups[0, 0] = 2
    graph.replay()
    assert parameters.eq(-(1 + 10 + 20)).all()
    assert segments[0, 3].item() == 3


def test_work_goes_to_the_current_stream(gpu):
    side = torch.cuda.Stream()
    tensor = torch.zeros(1 << 20, device=gpu)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        tensor.fill_(3)
        made = kernels.scale_cast(tensor, 2.0)
    torch.cuda.current_stream().wait_stream(side)
    assert made.eq(6).all()


def test_arrays_of_other_libraries(gpu):
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    array = cupy.arange(6, dtype=cupy.float32)
    assert kernels.pack([array, torch.ones(2, device=gpu)]).tolist() == [0, 1, 2, 3, 4, 5, 1, 1]


def test_refusals_leave_nothing_behind(gpu):
    with pytest.raises(ValueError, match=r"tensors\[1\] is torch.float32 on cpu"):
        kernels.pack([torch.ones(3, device=gpu), torch.ones(3)])
    with pytest.raises(ValueError, match="parameters and gradients must be on one device"):
        kernels.sgd(
            torch.ones(3, device=gpu),
            torch.ones(3),
            None,
            kernels.segment_table([3], device=gpu),
            kernels.sgd_groups({"lr": 1.0}, device=gpu),
        )
    host = torch.ones(3)
    with pytest.raises(ValueError, match="must be of device 0, and is ordinary host memory"):
        _core.check_memory("cuda", host.data_ptr(), 0, "host")
    with pytest.raises(ValueError, match="4 bytes begins at address"):
        _core.scale_cast(2, "float32", 4, "float32", 3, 2.0, _core.Stream("cuda", 0, 0))
    assert torch.ones(3, device=gpu).sum().item() == 3
