"""Batches of other sizes, made from the rows of one sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["Batch", "batch_sizes", "resized"]

Batch = tuple[torch.Tensor, ...]


def batch_sizes(rows: int, ranks: int) -> tuple[int, ...]:
    """Return a quarter of the sample's rows, its rows, and four times as many; each has a row for every rank."""
    return tuple(sorted({max(rows // 4, ranks), rows, 4 * rows}))


def resized(sample: Sequence[torch.Tensor], rows: int) -> Batch:
    """So many rows of each tensor, in memory of their own: the first ones, or all of them again and again."""
    return tuple(_resized(each.detach(), rows) for each in sample)


def _resized(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    copies = math.ceil(rows / tensor.size(0))
    repeated = torch.cat([tensor] * copies)[:rows].clone()
    return repeated.pin_memory() if tensor.is_pinned() else repeated
