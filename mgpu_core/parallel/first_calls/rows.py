"""Outputs whose rows are in another dimension than the one along which ranks' outputs are joined: said once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.parallel.first_calls.calls import Call, Observer
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.nested import tensors_in

__all__ = ["RowsElsewhere", "rows_of_part"]


def rows_of_part(part: Any, dim: int) -> int:
    """Return the rows of the first tensor of a rank's arguments; -1 where there is none."""
    tensors = (each for each in tensors_in(part) if -each.dim() <= dim < each.dim())
    return next((each.size(dim) for each in tensors), -1)


class RowsElsewhere(Observer):
    """Warns of an output without its rows along the dimension, one other dimension of which has them.

    Args:
        dim: along which outputs are joined.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def end(self, call: Call) -> bool:
        dim, rows = self._dim, list(call.rows)
        tables = list(map(tensors_in, call.outputs))
        if len(rows) < 2 or min(rows) < 1 or len(set(map(len, tables))) != 1:
            return False
        for column in zip(*tables, strict=True):
            if any(size == count for size, count in zip(_sizes(column, dim), rows, strict=True)):
                continue
            axes = [axis for axis in range(column[0].dim()) if axis != dim and _sizes(column, axis) == rows]
            if len(axes) == 1 and (len(set(rows)) > 1 or rows[0] > 1):
                shapes = " and ".join(str(tuple(each.shape)) for each in column[:2])
                warn_user(
                    f"the ranks' outputs have shapes {shapes}: their rows seem to be along dimension {axes[0]}, and "
                    f"they are joined along dimension {dim}. Return output.transpose({dim}, {axes[0]}), or pass "
                    f"dim={axes[0]} where the inputs have their rows there, too"
                )
                return True
        return False


def _sizes(column: Sequence[torch.Tensor], dim: int) -> list[int]:
    return [each.size(dim) if -each.dim() <= dim < each.dim() else -1 for each in column]
