"""What `test_numba_kernels.py` runs in a process of its own: its kernels against the reference, on small whole numbers.

The argument is the device: `cpu` in numba's simulator, `cuda`, or `compiles`, which asks for no device. Prints for each
part that it is done, or why not. A simulated thread takes a fraction of a millisecond, so the sizes are small and
the blocks have 32 threads.
"""

import itertools
import re
import sys
import traceback
from types import SimpleNamespace

import pytest
import torch

from benchmarks.ladder.twins import numba_kernels
from mgpu_core.kernels import reference, segment_table, sgd_groups

COUNTS = [0, 1, 31, 33, 0, 129, 5]
DTYPES = [torch.float32, torch.float64]
POISON = 77
DEVICE = sys.argv[1]


def numbers(count, dtype, start=0):
    """Small whole numbers, behind an element that is not theirs, so that their memory is not aligned."""
    return ((torch.arange(count + 1, device=DEVICE) + start) % 13).to(dtype)[1:]


def poisoned(count, dtype):
    """Where to write, with a guard on both sides."""
    guarded = torch.full((count + 2,), POISON, dtype=dtype, device=DEVICE)
    return guarded, guarded[1:-1]


def packs():
    for (dtype, target), scale in itertools.product(itertools.product(DTYPES, DTYPES), (1.0, -0.5)):
        tensors = [numbers(count, dtype, start).reshape(1, -1) for start, count in enumerate(COUNTS)]
        guarded, out = poisoned(sum(COUNTS), target)
        assert numba_kernels.pack(tensors, dtype=target, scale=scale, out=out) is out
        assert torch.equal(out, reference.pack(tensors, scale, target))
        assert guarded[[0, -1]].tolist() == [POISON, POISON]


def many_pieces():
    tensors = [numbers(1 + index % 3, torch.float32, index) for index in range(2 * numba_kernels.MOST_ARRAYS + 1)]
    assert torch.equal(numba_kernels.pack(tensors), torch.cat(tensors))


def sums():
    for dtype, op, ranks in itertools.product(DTYPES, ("sum", "avg", "prod", "min", "max"), (1, 2, 3)):
        tensors = [numbers(33, dtype, 5 * rank) for rank in range(ranks)]
        guarded, out = poisoned(33, dtype)
        assert numba_kernels.sum_ranks(tensors, op, out=out) is out
        assert torch.equal(out, reference.sum_ranks(tensors, op))
        assert guarded[[0, -1]].tolist() == [POISON, POISON]


def special_numbers():
    nan = float("nan")
    tensors = [torch.tensor(row, device=DEVICE) for row in ([nan, 1.0, 2.0], [1.0, nan, 3.0])]
    for op, last in (("min", 2.0), ("max", 3.0)):
        made = numba_kernels.sum_ranks(tensors, op)
        assert made.isnan().tolist() == [True, True, False]
        assert made[2] == last


def flat(dtype):
    """Two groups, gaps, an empty segment, and one that is not active."""
    counts = [5, 0, 33, 7, 20]
    segments = segment_table(counts, groups=[0, 0, 1, 1, 0], begins=[0, 5, 6, 39, 50], device=DEVICE)
    segments[3, 4] = 0
    groups = sgd_groups(
        {"lr": 0.5, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125, "nesterov": 1, "maximize": 1},
        {"lr": 0.25},
        device=DEVICE,
    )
    return [numbers(73, dtype, start) for start in (1, 2, 3)], segments, groups


def steps_of_sgd():
    scalars = {"clip": torch.tensor([0.5], device=DEVICE)}
    for dtype, given in itertools.product(DTYPES, ({}, scalars)):
        tensors, segments, groups = flat(dtype)
        truths, rows = [tensor.clone() for tensor in tensors], segments.clone()
        for found_inf in (0.0, 1.0, 0.0):
            found = torch.tensor(found_inf, device=DEVICE)
            numba_kernels.sgd(*tensors, segments, groups, **given, found_inf=found)
            reference.sgd(*truths, rows, groups, given.get("clip"), found)
            assert all(torch.equal(one, other) for one, other in zip(tensors, truths, strict=True))
            assert torch.equal(segments, rows)
        assert segments[:, 3].tolist() == [2, 2, 2, 0, 2]


def a_step_without_momentum():
    (parameters, gradients, _), segments, _ = flat(torch.float32)
    truth = parameters.clone()
    groups = sgd_groups({"lr": 0.5}, {"lr": 0.25}, device=DEVICE)
    reference.sgd(truth, gradients, None, segments.clone(), groups, None, None)
    numba_kernels.sgd(parameters, gradients, None, segments, groups)
    assert torch.equal(parameters, truth)


def refusals():
    for wrong, words in (
        (lambda: numba_kernels.pack([torch.ones(3, dtype=torch.float16)]), "float32 and float64, not on torch.float16"),
        (lambda: numba_kernels.sum_ranks([torch.ones(3)], "mean"), "op must be one of"),
        (lambda: numba_kernels.sum_ranks([torch.ones(3)] * 17), "room for 16 tensors, not for 17"),
        (lambda: numba_kernels.sum_ranks([torch.ones(3), torch.ones(4)]), r"tensors[1] must be (3,)"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            wrong()


def compiles():
    """Every kernel to PTX, by numba's real compiler, which needs no GPU once it is told for which one."""
    from numba import types
    from numba.cuda import compile_ptx, dispatcher

    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
    segments, groups = (types.Array(dtype, 2, "C") for dtype in (types.int64, types.float64))
    table, scalars = (types.Array(dtype, 1, "C") for dtype in (types.int64, types.float32))
    for dtype in (types.float32, types.float64):
        flat, constants = (types.Array(dtype, dimensions, "C") for dimensions in (1, 2))
        for kernel, arguments in (
            (numba_kernels.pack_kernel, (types.UniTuple(flat, numba_kernels.MOST_ARRAYS), table, table, flat, dtype)),
            *((numba_kernels.sum_kernel(op), (types.UniTuple(flat, 3), flat, dtype)) for op in ("avg", "prod", "min")),
            (numba_kernels.prepare_kernel, (segments, groups, scalars, constants)),
            (numba_kernels.sgd_kernel, (flat, flat, flat, segments, constants)),
        ):
            ptx, _ = compile_ptx(kernel.py_func, types.void(*arguments), cc=(9, 0))
            assert ".target sm_90" in ptx


PARTS = (packs, many_pieces, sums, special_numbers, steps_of_sgd, a_step_without_momentum, refusals)

if __name__ == "__main__":
    numba_kernels.THREADS = 32
    for part in (compiles,) if DEVICE == "compiles" else PARTS:
        try:
            part()
            print(f"{part.__name__}: done")
        except Exception:
            print(f"{part.__name__}: {traceback.format_exc()}")
