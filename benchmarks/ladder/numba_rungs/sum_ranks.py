"""The tensors of several ranks added up in the order of the ranks: out[i] = in[0][i] + in[1][i] + ...

Rungs 1 to 3 take one launch per rank, which adds that rank's tensor to a running sum in memory. The sum is float32 also
for half precision, which is rounded only once, by the last launch: it writes the result itself.
"""
# mypy: disable-error-code="untyped-decorator"

from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.ladder.numba_rungs import pack
from benchmarks.ladder.numba_rungs.launches import Launch, blocks_of, cuda, few_blocks_of, parts
from benchmarks.ladder.numba_rungs.pairs import high, low, word_of
from benchmarks.ladder.problems import SumProblem

STRETCH = 32
"""Neighbours that one thread does in the naive rung."""


# 1. Naive: a thread does STRETCH neighbours, so the threads of a warp are far apart in each of three arrays.
@cuda.jit
def naive_kernel(total: Any, source: Any, target: Any) -> None:
    """target = total + source; total and target may be one array."""
    begin = cuda.grid(1) * STRETCH
    end = begin + STRETCH if begin + STRETCH < source.size else source.size  # `min` is not in all of numba's compilers
    for i in range(begin, end):
        target[i] = np.float32(total[i]) + np.float32(source[i])


@cuda.jit(device=True)
def one_first(value: Any) -> Any:
    """What a sum begins with: float32."""
    return np.float32(value)


@cuda.jit(device=True)
def one_added(total: Any, value: Any) -> Any:
    """An element."""
    return total + np.float32(value)


@cuda.jit(device=True)
def pair_first(word: Any) -> Any:
    """Two elements as they are."""
    return word


@cuda.jit(device=True)
def pair_added(total: Any, word: Any) -> Any:
    """Two elements in one word."""
    return word_of(low(total) + low(word), high(total) + high(word))


# 2. Coalesced: neighbouring threads, neighbouring elements; every transaction is used whole.
# 3. Vectorised: the same loop over pairs.
@cache
def each_kernel(paired: bool) -> Any:
    """One rank's elements or pairs on top of the running sum."""
    added = pair_added if paired else one_added

    @cuda.jit
    def kernel(total: Any, source: Any, target: Any) -> None:
        for i in range(cuda.grid(1), source.size, cuda.gridsize(1)):
            target[i] = added(total[i], source[i])

    return kernel


# 4. Fused: one launch reads all ranks and keeps the sum in a register, so each element is read once and written once.
# The number of ranks is part of the tuple's type. So the compiler knows it, can take the loop apart, and ask for the
# elements of all ranks before it adds the first.
@cache
def fused_kernel(paired: bool) -> Any:
    """The elements or pairs of all ranks."""
    first, added = (pair_first, pair_added) if paired else (one_first, one_added)

    @cuda.jit
    def kernel(sources: Any, target: Any) -> None:
        i = cuda.grid(1)
        if i >= target.size:
            return
        total = first(sources[0][i])
        for rank in range(1, len(sources)):
            total = added(total, sources[rank][i])
        target[i] = total

    return kernel


def launches(problem: SumProblem, rung: str) -> list[Launch]:
    """What the rung launches, in this order."""
    out = problem.output.inside
    if rung == "fused":
        cut = parts(*problem.tensors, out)
        return [(fused_kernel(paired), blocks_of(to.numel()), (tuple(ranks), to)) for paired, (*ranks, to) in cut]
    first, *others = problem.tensors
    targets = [problem.scratch] * len(others) + [out]
    made = pack.copies(first, targets[0], rung)
    for source, target in zip(others, targets[1:], strict=True):
        made += _add(problem.scratch, source, target, rung)
    return made


def _add(total: torch.Tensor, source: torch.Tensor, target: torch.Tensor, rung: str) -> list[Launch]:
    if rung == "naive":
        return [(naive_kernel, blocks_of(source.numel(), STRETCH), (total, source, target))]
    arrays = total, source, target
    cut = parts(*arrays) if rung == "vectorised" else [(False, arrays)]
    return [(each_kernel(paired), few_blocks_of(given[0].numel()), given) for paired, given in cut]
