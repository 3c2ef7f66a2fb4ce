"""Outputs whose rows are in another dimension than the one along which ranks' outputs are joined: said once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.nested import tensors_in

__all__ = ["rows_of_part", "warn_rows_elsewhere"]


def rows_of_part(part: Any, dim: int) -> int:
    """Return the rows of the first tensor of a rank's arguments; -1 where there is none."""
    tensors = (each for each in tensors_in(part) if -each.dim() <= dim < each.dim())
    return next((each.size(dim) for each in tensors), -1)


def warn_rows_elsewhere(outputs: Sequence[Any], rows: Sequence[int], dim: int) -> bool:
    """Warn of an output without its rows along ``dim``, one other dimension of which has them; return whether it did.

    Args:
        outputs: of each rank.
        rows: of each rank.
        dim: along which outputs are joined.
    """
    if len(rows) < 2 or min(rows) < 1:
        return False
    tables = list(map(tensors_in, outputs))
    if len(set(map(len, tables))) != 1:
        return False
    for column in zip(*tables, strict=True):
        if any(size == count for size, count in zip(_sizes(column, dim), rows, strict=True)):
            continue
        axes = [axis for axis in range(column[0].dim()) if axis != dim and _sizes(column, axis) == list(rows)]
        if len(axes) == 1 and (len(set(rows)) > 1 or rows[0] > 1):
            shapes = " and ".join(str(tuple(each.shape)) for each in column[:2])
            warn_user(
                f"the ranks' outputs have shapes {shapes}: their rows seem to be along dimension {axes[0]}, and they "
                f"are joined along dimension {dim}. Return output.transpose({dim}, {axes[0]}), or pass dim={axes[0]} "
                "where the inputs have their rows there, too"
            )
            return True
    return False


def _sizes(column: Sequence[torch.Tensor], dim: int) -> list[int]:
    return [each.size(dim) if -each.dim() <= dim < each.dim() else -1 for each in column]
