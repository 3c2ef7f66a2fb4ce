"""The public functions: ``scatter`` and ``scatter_kwargs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.comm import autograd
from mgpu_core.devices.devices import DeviceLike
from mgpu_core.devices.traces import refuse_traces
from mgpu_core.parallel.scatter_inputs.arguments import cut
from mgpu_core.parallel.scatter_inputs.chunks import check_shares, row_counts, rows_of_bare
from mgpu_core.parallel.scatter_inputs.replicated import trace_replicated
from mgpu_core.ranks.team import Team
from mgpu_core.trace.tracer import is_tracing, span
from mgpu_core.trees.nested import moved

__all__ = ["scatter", "scatter_kwargs"]


def scatter(
    inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0, *, shares: Sequence[float] | None = None
) -> Any:
    """Cut every tensor of ``inputs`` along ``dim`` into one chunk per rank; differentiable.

    Args:
        inputs: a tensor, or any nest of named tuples, mappings, dataclasses, lists and tuples.
        target_gpus: one device per rank.
        dim: the dimension along which to cut; may be negative.
        shares: rows in this proportion, one positive number per rank (default: sizes differ by at most one).

    Returns:
        One object per rank, as a tuple for a bare tensor and a list for anything else.  With fewer rows than ranks
        there are as many entries as rows; with none, one.  Chunks are fresh memory on the rank's device; with one rank
        nothing is cut, and a tensor that is on its device is passed on as it is.

    Raises:
        ValueError: tensors that disagree on the number of rows (the message names both), a bad device or share.
        TypeError: packed sequences, nested, sparse and quantized tensors.
        IndexError: a tensor without dimension ``dim``.
    """
    refuse_traces()
    team = Team.of(target_gpus)
    with span("scatter"):
        if type(inputs) is torch.Tensor and (columns := _bare((inputs,), team, dim, shares)) is not None:
            return columns[0]
        parts = [part for (part,) in cut({"inputs": inputs}, team, dim, shares)[0]]
    return tuple(parts) if isinstance(inputs, torch.Tensor) else parts


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[DeviceLike] | Team,
    dim: int = 0,
    *,
    shares: Sequence[float] | None = None,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """:func:`scatter` for positional and keyword arguments together: one tuple and one dict per rank.

    Both are empty when there are no arguments at all, as in torch.
    """
    refuse_traces()
    team = Team.of(target_gpus)
    if not inputs and not kwargs:
        return (), ()
    with span("scatter"):
        if len(team) == 1:
            device = team.devices[0]
            if is_tracing():  # the dictionary costs too
                trace_replicated({"inputs": inputs, "kwargs": kwargs or {}}, device, dim)
            whole = {name: moved(value, device) for name, value in kwargs.items()} if kwargs else {}
            return (tuple([moved(value, device) for value in inputs]),), (whole,)
        if not kwargs and (columns := _bare(inputs, team, dim, shares)) is not None:
            return tuple(zip(*columns, strict=True)), tuple([{} for _ in columns[0]])
        objects = {"inputs": tuple(inputs), "kwargs": dict(kwargs or {})}
        pairs, _ = cut(objects, team, dim, shares, dealt="kwargs")
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def _bare(
    tensors: Sequence[Any], team: Team, dim: int, shares: Sequence[float] | None
) -> list[tuple[torch.Tensor, ...]] | None:
    """Return the chunks of each where all are bare tensors of as many rows, for several ranks: the shortest way.

    ``None``: it is something else, or wrong, or a recording wants names.
    """
    rows = rows_of_bare(tensors, dim)
    if rows is None or len(team.devices) == 1 or is_tracing():
        return None
    check_shares(shares, len(team))
    counts = row_counts(rows, len(team), shares)
    team = team.first(len(counts))
    try:
        return [autograd.scatter(each, team.devices, counts, dim) for each in tensors]
    except (ValueError, TypeError):
        return None  # the long way says which one it is
