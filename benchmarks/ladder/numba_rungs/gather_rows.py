"""Rows of bytes by index, normalised: out[b][i] = rows[index[b]][i] * scale + shift. Every index is in range.

Rungs 1 to 3 take two launches: `pick` copies the rows into a batch of bytes, `normalise` makes numbers of them.
"""
# mypy: disable-error-code="untyped-decorator"

from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.ladder.numba_rungs.launches import MOST_BLOCKS, Launch, blocks_of, cuda, few_blocks_of, parts
from benchmarks.ladder.numba_rungs.pairs import word_of
from benchmarks.ladder.problems import GatherProblem

IN_FLIGHT = 4
"""Rows that a block of the fused rung has on their way."""


# 1. Naive: a thread per row. The threads of a warp are a whole row apart, and most of the GPU has nothing to do.
@cuda.jit
def pick_naive_kernel(rows: Any, index: Any, picked: Any) -> None:
    """The bytes of a row."""
    b = cuda.grid(1)
    if b < index.size:
        for i in range(rows.shape[1]):
            picked[b, i] = rows[index[b], i]


@cuda.jit
def normalise_naive_kernel(picked: Any, out: Any, scale: Any, shift: Any) -> None:
    """The numbers of a row."""
    b = cuda.grid(1)
    if b < picked.shape[0]:
        for i in range(picked.shape[1]):
            out[b, i] = np.float32(picked[b, i]) * scale + shift


# 2. Coalesced: a block per row, and its neighbouring threads do neighbouring bytes.
# 3. Vectorised: the same loop; the arrays are 8-byte words where all rows are whole words.
@cuda.jit
def pick_kernel(rows: Any, index: Any, picked: Any) -> None:
    """Rows of bytes or of words."""
    for b in range(cuda.blockIdx.x, index.size, cuda.gridDim.x):
        for i in range(cuda.threadIdx.x, rows.shape[1], cuda.blockDim.x):
            picked[b, i] = rows[index[b], i]


@cuda.jit(device=True)
def one_normalised(byte: Any, scale: Any, shift: Any) -> Any:
    """A pixel."""
    return np.float32(byte) * scale + shift


@cuda.jit(device=True)
def pair_normalised(word: Any, scale: Any, shift: Any) -> Any:
    """Two pixels in one int16, into two float32 in one int64."""
    first, second = np.float32(word & 0xFF), np.float32((word >> 8) & 0xFF)
    return word_of(first * scale + shift, second * scale + shift)


@cache
def normalise_kernel(paired: bool) -> Any:
    """Pixels or pairs of them; rows no longer matter, the batch is one long array."""
    normalised = pair_normalised if paired else one_normalised

    @cuda.jit
    def kernel(picked: Any, out: Any, scale: Any, shift: Any) -> None:
        for i in range(cuda.grid(1), picked.size, cuda.gridsize(1)):
            out[i] = normalised(picked[i], scale, shift)

    return kernel


# 4. Fused: one launch picks and normalises, so the batch of bytes is never written and never read again. A block does
# four rows: its threads wait for four indices together, then for four rows together. Behind the last row there is
# none: the last is then done again, which costs less than asking.
@cache
def fused_kernel(paired: bool) -> Any:
    """Rows of pixels or of pairs."""
    normalised = pair_normalised if paired else one_normalised

    @cuda.jit
    def kernel(rows: Any, index: Any, out: Any, scale: Any, shift: Any) -> None:
        first, last = cuda.blockIdx.x * IN_FLIGHT, index.size - 1
        # `min` is not in all of numba's compilers.
        b = first + 1 if first + 1 < last else last
        c = first + 2 if first + 2 < last else last
        d = first + 3 if first + 3 < last else last
        row_a, row_b, row_c, row_d = index[first], index[b], index[c], index[d]
        for i in range(cuda.threadIdx.x, rows.shape[1], cuda.blockDim.x):
            in_a, in_b, in_c, in_d = rows[row_a, i], rows[row_b, i], rows[row_c, i], rows[row_d, i]
            out[first, i] = normalised(in_a, scale, shift)
            out[b, i] = normalised(in_b, scale, shift)
            out[c, i] = normalised(in_c, scale, shift)
            out[d, i] = normalised(in_d, scale, shift)

    return kernel


def launches(problem: GatherProblem, rung: str) -> list[Launch]:
    """What the rung launches, in this order."""
    line = np.float32(problem.scale), np.float32(problem.shift_by)
    shape = problem.batch, problem.row_count
    rows, picked, out = problem.rows, problem.picked.view(shape), problem.output.inside.view(shape)
    if rung == "naive":
        blocks = blocks_of(problem.batch)
        pick = pick_naive_kernel, blocks, (rows, problem.index, picked)
        return [pick, (normalise_naive_kernel, blocks, (picked, out, *line))]
    if rung == "fused":
        paired = _whole(2, rows) and _whole(2, out) and out.dtype == torch.float32
        arrays = (rows.view(torch.int16), out.view(torch.int64)) if paired else (rows, out)
        blocks = -(-problem.batch // IN_FLIGHT)
        return [(fused_kernel(paired), blocks, (arrays[0], problem.index, arrays[1], *line))]
    wide = rung == "vectorised" and _whole(8, rows) and _whole(8, picked)
    source, target = (rows.view(torch.int64), picked.view(torch.int64)) if wide else (rows, picked)
    flat = problem.picked, problem.output.inside
    cut = parts(*flat) if rung == "vectorised" else [(False, flat)]
    normalise = [(normalise_kernel(paired), few_blocks_of(given[0].numel()), (*given, *line)) for paired, given in cut]
    return [(pick_kernel, min(problem.batch, MOST_BLOCKS), (source, problem.index, target)), *normalise]


def _whole(elements: int, rows: torch.Tensor) -> bool:
    """Whether all rows are whole groups of so many elements, each on a multiple of its size."""
    return rows.shape[1] % elements == 0 and rows.data_ptr() % (elements * rows.itemsize) == 0
