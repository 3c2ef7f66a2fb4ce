"""Which rows a rank gets, and its chunk of a tensor as a view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.trees.nested import is_undivided

__all__ = ["check_shares", "is_plain", "row_counts", "rows_of_bare", "views_of"]


def check_shares(shares: Sequence[float] | None, ranks: int) -> None:
    """Raise ValueError, or TypeError, unless there is one positive number per rank."""
    if shares is None:
        return
    if isinstance(shares, str) or not hasattr(shares, "__len__"):
        raise TypeError(f"shares must be a sequence with one number per rank, not {shares!r}")
    if len(shares) != ranks:
        raise ValueError(f"shares must have one number per rank: {ranks} ranks, {len(shares)} shares")
    for rank, share in enumerate(shares):
        if isinstance(share, str) or not hasattr(share, "__float__"):
            raise TypeError(f"shares[{rank}] must be a positive number, not {share!r}")
        if not 0 < share < float("inf"):
            raise ValueError(f"shares[{rank}] must be a positive number, not {share}; leave the device out instead")


def row_counts(rows: int, ranks: int, shares: Sequence[float] | None) -> list[int]:
    """Return the rows of each rank that works.  Without any rows rank 0 runs once, with none."""
    return list(_planned(rows, ranks, None if shares is None else tuple(map(float, shares))))


@lru_cache(maxsize=256)
def _planned(rows: int, ranks: int, shares: tuple[float, ...] | None) -> tuple[int, ...]:
    plan = _core.chunk_plan(rows, ranks) if shares is None else _core.share_plan(rows, list(shares))
    return tuple(count for _, count in plan if count) or (0,)


def rows_of_bare(values: Iterable[Any], dim: int) -> int | None:
    """Return the rows along ``dim`` of bare tensors; ``None`` where one is something else, or they disagree."""
    rows: int | None = None
    for each in values:
        if type(each) is not torch.Tensor or is_undivided(each) or not -each.ndim <= dim < each.ndim:
            return None
        if rows is None:
            rows = each.shape[dim]
        elif each.shape[dim] != rows:
            return None
    return rows


def views_of(leaf: torch.Tensor, counts: list[int], dim: int) -> list[torch.Tensor]:
    """Return chunks without a copy, each with a version of its own: ranks may write theirs in place.

    Where the tensor is contiguous and a chunk would not be (``dim=1``), the chunk is copied, as between devices.
    """
    chunks: Iterable[torch.Tensor] = torch.split_with_sizes(leaf, counts, dim)
    if dim and leaf.is_contiguous():
        chunks = map(torch.Tensor.contiguous, chunks)
    return list(map(_data_of, chunks))


_data_of = attrgetter("data")


def is_plain(leaf: torch.Tensor) -> bool:
    """Return True if a view of the tensor is sufficient: dense, at least 1-D, no autograd."""
    return leaf.dim() > 0 and not (leaf.requires_grad or is_undivided(leaf))
