"""Scatter the inputs of a step; bare tensors on the only device take a fast path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch

from mgpu_core.comm.trace_hooks import trace_cut
from mgpu_core.devices.tensor_checks import begin_alike
from mgpu_core.parallel.scatter_inputs.arguments import Arguments, cut
from mgpu_core.parallel.scatter_inputs.chunks import check_shares, row_counts, rows_of_bare, views_of
from mgpu_core.parallel.scatter_inputs.replicated import trace_replicated
from mgpu_core.ranks.team import Team
from mgpu_core.trace.tracer import is_tracing, span

__all__ = ["scatter_objects"]


def scatter_objects(
    objects: dict[str, Any], team: Team, dim: int = 0, *, shares: Sequence[float] | None = None
) -> tuple[list[list[Any]], list[int]]:
    """Scatter several objects, named as in errors, at the same rows.

    Where all ranks are on a tensor's device, and no graph goes through it, their chunks are views of it.

    Returns:
        Per rank its part of each object, and per rank its rows: zeros where no object has any.
    """
    with span("scatter"):
        found = _plain_views(objects, team, dim, shares)
        if found is not None:
            return found
        parts, counts = cut(objects, team, dim, shares, as_views=True)
        if len(team) == 1:
            counts = [_rows_of(objects, dim)]
    return parts, [0] * len(parts) if counts is None else counts


def _plain_views(
    objects: dict[str, Any], team: Team, dim: int, shares: Sequence[float] | None
) -> tuple[list[list[Any]], list[int]] | None:
    """Cut bare tensors, and tuples of them, on the only device, without flattening a nest.

    One rank gets them as they are.  ``None``: it is something else, or wrong.
    """
    tensors: list[torch.Tensor] = []
    for obj in objects.values():
        if type(obj) is not dict or obj:
            tensors += obj if type(obj) is tuple else [obj]
    devices = team.devices
    rows, device = rows_of_bare(tensors, dim), devices[0]
    if rows is None:
        return None
    for other in devices:
        if other != device:
            return None
    for each in tensors:
        if each.device != device or each.requires_grad:
            return None
    ranks = len(devices)
    if shares is not None:
        check_shares(shares, ranks)
    if ranks == 1:
        trace_replicated(objects, device, dim)
        return [list(objects.values())], [rows]
    counts = row_counts(rows, ranks, shares)
    columns = list(map(views_of, tensors, repeat(counts), repeat(dim)))
    if is_tracing():
        for name, each, views in zip(_names(objects), tensors, columns, strict=True):
            route = "view" if begin_alike(views[0], each) else "copy"
            trace_cut("scatter", name, each.device, views, dim, route)
    return _rebuilt(objects, columns), counts


def _names(objects: dict[str, Any]) -> Iterator[str]:
    """Return the names of bare tensors and of the members of tuples."""
    for name, obj in objects.items():
        if type(obj) is tuple:
            yield from (f"{name}[{index}]" for index in range(len(obj)))
        elif torch.is_tensor(obj):
            yield name


def _rebuilt(objects: dict[str, Any], columns: list[list[torch.Tensor]]) -> list[list[Any]]:
    """Return per rank its objects: tensors, tuples and empty dicts as they were, with the rank's chunks."""
    made: list[list[Any]] = [[] for _ in columns[0]]
    begin = 0
    for obj in objects.values():
        if type(obj) is tuple:
            end = begin + len(obj)
            parts: Any = zip(*columns[begin:end], strict=True) if obj else [()] * len(made)
        elif type(obj) is dict:
            end, parts = begin, map(dict, repeat((), len(made)))
        else:
            end, parts = begin + 1, columns[begin]
        for rank, part in zip(made, parts, strict=True):
            rank += (part,)
        begin = end
    return made


def _rows_of(objects: dict[str, Any], dim: int) -> int:
    """Return the number of rows of inputs that a single rank gets whole."""
    for obj in objects.values():  # as a rule a bare tensor says it
        first = obj[0] if isinstance(obj, tuple) and obj else obj
        if type(first) is torch.Tensor and first.dim() > dim >= 0:
            return first.size(dim)
    return Arguments(objects).rows(dim) or 0
