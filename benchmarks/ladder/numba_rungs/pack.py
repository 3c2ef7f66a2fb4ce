"""Many tensors into one flat buffer, scaled and cast: flat[begin + i] = tensor[i] * scale.

Rungs 1 to 3 need one launch per tensor, which copies it into a scratch buffer (scale 1), and then one launch over all
of it, which scales and casts.
"""
# mypy: disable-error-code="untyped-decorator"

from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from benchmarks.ladder.numba_rungs.launches import (
    Launch,
    blocks_of,
    cuda,
    few_blocks_of,
    in_groups,
    parts,
)
from benchmarks.ladder.numba_rungs.pairs import high, low, word_of
from benchmarks.ladder.problems import PackProblem

STRETCH = 32
"""Neighbours that one thread does in the naive rung."""
IN_FLIGHT = 4
"""Loads of a thread in the fused rung that are on their way before it stores anything."""
MOST_ARRAYS = 16
"""Of one launch: numba has no pointers, so a table of arrays is a tuple of them, handed over with the launch."""


# 1. Naive: a thread does STRETCH neighbours. In every step the 32 threads of a warp are STRETCH elements apart: 32
# memory transactions for 32 elements, where 4 would do.
@cuda.jit
def naive_kernel(source: Any, target: Any, scale: Any) -> None:
    """One array."""
    begin = cuda.grid(1) * STRETCH
    end = begin + STRETCH if begin + STRETCH < source.size else source.size  # `min` is not in all of numba's compilers
    for i in range(begin, end):
        target[i] = np.float32(source[i]) * scale


@cuda.jit(device=True)
def one_scaled(value: Any, scale: Any) -> Any:
    """An element."""
    return np.float32(value) * scale


@cuda.jit(device=True)
def pair_scaled(word: Any, scale: Any) -> Any:
    """Two elements in one word."""
    return word_of(low(word) * scale, high(word) * scale)


# 2. Coalesced: neighbouring threads do neighbouring elements, and all go on by the width of the grid.
# 3. Vectorised: the same loop over pairs; half of the instructions for the same bytes.
@cache
def each_kernel(paired: bool) -> Any:
    """One array of elements or of pairs."""
    scaled = pair_scaled if paired else one_scaled

    @cuda.jit
    def kernel(source: Any, target: Any, scale: Any) -> None:
        for i in range(cuda.grid(1), source.size, cuda.gridsize(1)):
            target[i] = scaled(source[i], scale)

    return kernel


@cuda.jit(device=True)
def owner_of(first_tile: Any, tile: Any) -> Any:
    """Return the index of the piece that holds `tile`: the last whose first tile is not after it."""
    low_index, high_index = 0, len(first_tile) - 1
    while low_index < high_index:
        middle = (low_index + high_index + 1) // 2
        if first_tile[middle] <= tile:
            low_index = middle
        else:
            high_index = middle - 1
    return low_index


# 4. Fused: one pass, and a launch per MOST_ARRAYS tensors. The scratch buffer is gone, and with it half of the bytes. A
# block does one tile of one tensor; a thread asks for four elements before it waits for the first.
@cache
def fused_kernel(paired: bool) -> Any:
    """Many arrays of elements or of pairs."""
    scaled = pair_scaled if paired else one_scaled

    @cuda.jit
    def kernel(sources: Any, targets: Any, first_tile: Any, scale: Any) -> None:
        index = owner_of(first_tile, cuda.blockIdx.x)
        source, target, step = sources[index], targets[index], cuda.blockDim.x
        i = (cuda.blockIdx.x - first_tile[index]) * step * IN_FLIGHT + cuda.threadIdx.x
        if i + 3 * step < source.size:
            a, b, c, d = source[i], source[i + step], source[i + 2 * step], source[i + 3 * step]
            target[i] = scaled(a, scale)
            target[i + step] = scaled(b, scale)
            target[i + 2 * step] = scaled(c, scale)
            target[i + 3 * step] = scaled(d, scale)
        else:
            for k in range(i, source.size, step):
                target[k] = scaled(source[k], scale)

    return kernel


def launches(problem: PackProblem, rung: str) -> list[Launch]:
    """What the rung launches, in this order."""
    scale, flat = np.float32(problem.scale), problem.output.inside
    if rung == "fused":
        targets = flat.split(problem.counts)
        cut = [part for pair in zip(problem.tensors, targets, strict=True) for part in parts(*pair)]
        return [_fused(paired, group, scale) for paired, group in in_groups(cut, MOST_ARRAYS)]
    indices = problem.scratch.split(problem.counts)
    made = [launch for pair in zip(problem.tensors, indices, strict=True) for launch in copies(*pair, rung)]
    return made + _each(problem.scratch, flat, scale, rung)


def copies(source: torch.Tensor, target: torch.Tensor, rung: str) -> list[Launch]:
    """The same kernels as a copy."""
    return _each(source, target, np.float32(1), rung)


def _each(source: torch.Tensor, target: torch.Tensor, scale: Any, rung: str) -> list[Launch]:
    count = source.numel()
    if rung == "naive":
        return [(naive_kernel, blocks_of(count, STRETCH), (source, target, scale))]
    cut = parts(source, target) if rung == "vectorised" else [(False, (source, target))]
    return [(each_kernel(paired), few_blocks_of(arrays[0].numel()), (*arrays, scale)) for paired, arrays in cut]


def _fused(paired: bool, group: list[tuple[torch.Tensor, torch.Tensor]], scale: Any) -> Launch:
    tiles = [blocks_of(source.numel(), IN_FLIGHT) for source, _ in group]
    first_tile = torch.tensor(list(accumulate(tiles, initial=0))[:-1], device=group[0][0].device)
    # Always as many: a tuple of another length would be another kernel to compile. Nobody looks at the last ones.
    sources, targets = zip(*group, *[group[-1]] * (MOST_ARRAYS - len(group)), strict=True)
    return fused_kernel(paired), sum(tiles), (sources, targets, first_tile, scale)
