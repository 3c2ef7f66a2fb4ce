"""The tables that the optimizer kernels read: where each tensor lies, and the hyper-parameters of its group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

__all__ = [
    "ACTIVE",
    "BEGIN",
    "COUNT",
    "GROUP",
    "STEP",
    "adam_groups",
    "check_rows",
    "lion_groups",
    "segment_table",
    "sgd_groups",
]

BEGIN, COUNT, GROUP, STEP, ACTIVE = range(5)  # the columns of a segment table


def segment_table(
    counts: Sequence[int],
    *,
    groups: Sequence[int] | None = None,
    begins: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the table of the tensors in a flat buffer: int64, ``(len(counts), 5)``: begin, count, group, step, active.

    Args:
        counts: elements of each tensor.
        groups: the row of the group table for each (default: 0).
        begins: where each begins (default: one right after the other).
        device: where the flat buffers are (default: torch's default device).

    Steps are 0 and all segments active.  The kernels raise the step of every segment that they update.  Set
    ``table[i, 4]`` to 0 to leave tensor ``i`` unchanged, as a parameter without gradient.

    Raises:
        ValueError: segments that overlap or are not in the order of their begins; other numbers of groups or begins.
    """
    for name, numbers in (("groups", groups), ("begins", begins)):
        if numbers is not None and len(numbers) != len(counts):
            raise ValueError(f"{name} must have one number per tensor: {len(counts)} tensors, {len(numbers)} {name}")
    starts = list(begins) if begins is not None else list(accumulate(counts, initial=0))[: len(counts)]
    rows = [[start, count, 0, 0, 1] for start, count in zip(starts, counts, strict=True)]
    for index, group in enumerate(groups or []):
        rows[index][GROUP] = group
    check_rows(rows, end=None)
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), 5)


def sgd_groups(*groups: dict[str, float], device: torch.device | str | None = None) -> torch.Tensor:
    """Return the group table of :func:`sgd`: float64, ``(len(groups), 6)``.

    Args:
        groups: each with ``lr``, and optionally ``momentum``, ``dampening``, ``weight_decay``, ``nesterov`` and
            ``maximize`` (default 0), as in ``torch.optim.SGD``.
    """
    columns = {"lr": None, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}
    return _group_table(groups, columns, device)


def adam_groups(*groups: dict[str, float], device: torch.device | str | None = None) -> torch.Tensor:
    """Return the group table of :func:`adam` and :func:`adamw`: float64, ``(len(groups), 6)``.

    Args:
        groups: each with ``lr``, and optionally ``beta1`` (0.9), ``beta2`` (0.999), ``eps`` (1e-8),
            ``weight_decay`` (0) and ``maximize`` (0), as in ``torch.optim.Adam``.
    """
    columns = {"lr": None, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "maximize": 0.0}
    return _group_table(groups, columns, device)


def lion_groups(*groups: dict[str, float], device: torch.device | str | None = None) -> torch.Tensor:
    """Return the group table of :func:`lion`: float64, ``(len(groups), 6)``, the last column unused.

    Args:
        groups: each with ``lr``, and optionally ``beta1`` (0.9), ``beta2`` (0.99), ``weight_decay`` (0) and
            ``maximize`` (0).
    """
    columns = {"lr": None, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "maximize": 0.0, "unused": 0.0}
    return _group_table(groups, columns, device)


def _group_table(
    groups: Sequence[dict[str, float]], columns: dict[str, float | None], device: torch.device | str | None
) -> torch.Tensor:
    for index, group in enumerate(groups):
        if unknown := set(group) - set(columns):
            raise ValueError(f"group {index} has {', '.join(sorted(unknown))}; known are {', '.join(columns)}")
        if "lr" not in group:
            raise ValueError(f"group {index} has no lr")
    rows = [[float(group.get(name, default or 0.0)) for name, default in columns.items()] for group in groups]
    return torch.tensor(rows, dtype=torch.float64, device=device).reshape(len(rows), len(columns))


def check_rows(rows: list[list[int]], *, end: int | None, groups: int | None = None) -> None:
    """Raise ValueError unless segments follow each other, before ``end``, and name groups that there are."""
    reach = 0
    for index, row in enumerate(rows):
        if row[BEGIN] < reach or row[COUNT] < 0:
            raise ValueError(f"segment {index} begins at {row[BEGIN]}, but the one before ends at {reach}")
        reach = row[BEGIN] + row[COUNT]
        if end is not None and reach > end:
            raise ValueError(f"segment {index} ends at {reach}, but the flat buffers have {end} elements")
        if groups is not None and not 0 <= row[GROUP] < groups:
            raise ValueError(f"segment {index} is of group {row[GROUP]}, but there are {groups} groups")
