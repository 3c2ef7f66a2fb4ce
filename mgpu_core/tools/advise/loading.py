"""Measure the input pipeline alone: seconds per batch, without computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import torch

from mgpu_core.tools.advise.benchmark import Budget

__all__ = ["first_batch", "loader_seconds", "rows_of"]

_GROUPS = 5


def loader_seconds(
    loader: Iterable[Any], rows: int, budget: Budget, now: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds to load ``rows`` rows: the median over a few groups of batches, without the first.

    A group is one batch of each worker of the loader: workers deliver in bursts, and only a round of all of them tells
    how fast they are together.  Batches of another size count by their rows.

    Raises:
        ValueError: it has too few batches for a group after the first.
    """
    size = max(1, int(getattr(loader, "num_workers", 0) or 0))
    batches = iter(loader)
    group_seconds: list[float] = []
    for number in range(_GROUPS + 1):
        begin, counts = now(), []
        for batch in batches:
            counts.append(rows_of(batch) or rows)
            if len(counts) == size:
                break
        if len(counts) < size:
            break
        if number:
            group_seconds.append((now() - begin) / sum(counts) * rows)
        if group_seconds and budget.left <= 0:
            break
    if not group_seconds:
        raise ValueError(f"the loader has too few batches to be measured: wanted {2 * size} or more")
    return median(group_seconds)


def rows_of(batch: object) -> int | None:
    """Return the rows of its first tensor; ``None`` if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, list | tuple):
        return None
    return next((rows for rows in map(rows_of, batch) if rows), None)


def first_batch(loader: Iterable[Any]) -> Any:
    """Return the first batch of a loader.

    Raises:
        ValueError: it has none, or is no loader.
    """
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ValueError(f"loader must be an iterable of batches, not {type(loader).__name__}")
    for batch in loader:
        return batch
    raise ValueError("the loader has no batch")
