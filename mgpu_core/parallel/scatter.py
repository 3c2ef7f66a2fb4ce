"""Scatter: a nested object becomes one per rank, its tensors cut along ``dim``.

All tensors are cut at the same rows, whatever their shapes, so they must agree on how many there are.  What cannot be
cut goes to every rank: scalars and :class:`~mgpu_core.nested.Replicate` as copies, everything else by reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core import _core
from mgpu_core.comm import autograd, broadcast
from mgpu_core.device.devices import DeviceLike
from mgpu_core.device.team import Team
from mgpu_core.nested import Replicate, Tree, flatten
from mgpu_core.record import span

__all__ = ["scatter", "scatter_kwargs"]


def scatter(
    inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0, *, shares: Sequence[float] | None = None
) -> Any:
    """Cuts every tensor of ``inputs`` along ``dim`` into one chunk per rank; differentiable.

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
        TypeError: packed sequences, nested and sparse tensors.
        IndexError: a tensor without dimension ``dim``.
    """
    team = Team.of(target_gpus)
    with span("scatter"):
        parts = _Cut(team, dim, shares).apply(inputs, "inputs")
    return tuple(parts) if isinstance(inputs, torch.Tensor) else parts


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[DeviceLike],
    dim: int = 0,
    *,
    shares: Sequence[float] | None = None,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """:func:`scatter` for positional and keyword arguments together: one tuple and one dict per rank.

    Both are empty when there are no arguments at all, as in torch.
    """
    team = Team.of(target_gpus)
    if not inputs and not kwargs:
        return (), ()
    with span("scatter"):
        pairs = _Cut(team, dim, shares).apply((tuple(inputs), dict(kwargs or {})), "")
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


_ROOTS = ("inputs", "kwargs")  # what scatter_kwargs calls its two halves in errors


class _Cut:
    """How one call cuts: decided by the first tensor that has rows, checked against all others."""

    def __init__(self, team: Team, dim: int, shares: Sequence[float] | None) -> None:
        self.team, self.dim, self.shares = team, dim, shares
        self.counts: list[int] | None = None  # rows per rank; None: nothing to cut
        if shares is not None and len(shares) != len(team):
            raise ValueError(f"shares must have one number per rank: {len(team)} ranks, {len(shares)} shares")

    def apply(self, obj: Any, root: str) -> list[Any]:
        if len(self.team) == 1:
            return [_whole(obj, self.team.devices[0])]
        leaves: list[Any] = []
        tree = flatten(obj, leaves, root)
        self._plan(leaves, tree, root)
        team = self.team if self.counts is None else self.team.first(len(self.counts))
        columns = [self._spread(leaf, team) for leaf in leaves]
        return [tree.unflatten(iter([column[rank] for column in columns])) for rank in team.ranks]

    def _plan(self, leaves: list[Any], tree: Tree, root: str) -> None:
        rows: int | None = None
        first = 0
        for place, leaf in enumerate(leaves):
            if not _is_cut(leaf):
                continue
            self._check_dim(leaf, tree, root, place)
            if rows is None:
                rows, first = leaf.size(self.dim), place
            elif leaf.size(self.dim) != rows:
                raise ValueError(self._disagreement(leaves, tree, root, first, place))
        if rows is not None:
            self.counts = self._counts(rows)

    def _counts(self, rows: int) -> list[int]:
        ranks = len(self.team)
        plan = _core.chunk_plan(rows, ranks) if self.shares is None else _core.share_plan(rows, list(self.shares))
        return [count for _, count in plan if count] or [0]  # no rows at all: rank 0 runs once, with none

    def _check_dim(self, leaf: torch.Tensor, tree: Tree, root: str, place: int) -> None:
        dims = leaf.dim()
        if not -dims <= self.dim < dims:
            raise IndexError(
                f"{_path(tree, root, place)} has shape {tuple(leaf.shape)} and cannot be cut along dimension {self.dim}"
            )

    def _disagreement(self, leaves: list[Any], tree: Tree, root: str, first: int, place: int) -> str:
        one, other = leaves[first], leaves[place]
        return (
            f"the inputs differ in their number of rows along dimension {self.dim}: {_path(tree, root, first)} has "
            f"shape {tuple(one.shape)}, {_path(tree, root, place)} has shape {tuple(other.shape)}. "
            "What every rank should get whole goes into mgpu_core.Replicate(...)"
        )

    def _spread(self, leaf: Any, team: Team) -> Sequence[Any]:
        if isinstance(leaf, Replicate):
            return _copies(leaf.value, team)
        if not isinstance(leaf, torch.Tensor):
            return [leaf] * len(team)
        if leaf.dim() == 0:
            return _copies(leaf, team)
        assert self.counts is not None  # a tensor with dimensions was seen by _plan
        return autograd.scatter(leaf, team, self.counts, self.dim)


def _whole(obj: Any, device: torch.device) -> Any:
    """One rank cuts nothing: everything goes to its device as it is, and what is there already is not even copied."""
    leaves: list[Any] = []
    tree = flatten(obj, leaves, "inputs", whole=True)
    moved = [_whole(leaf.value, device) if isinstance(leaf, Replicate) else _moved(leaf, device) for leaf in leaves]
    return tree.unflatten(iter(moved))


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor | PackedSequence) and leaf.data.device != device:
        return leaf.to(device)  # type: ignore[arg-type]  # torch's stub forgets devices
    return leaf


def _is_cut(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _path(tree: Tree, root: str, place: int) -> str:
    if root:
        return tree.paths(root)[place]
    halves = [path for name, half in zip(_ROOTS, tree.children, strict=True) for path in half.paths(name)]
    return halves[place]


def _copies(obj: Any, team: Team) -> list[Any]:
    """The nest whole for every rank: its tensors copied to fresh memory, differentiable, the rest by reference."""
    leaves: list[Any] = []
    tree = flatten(obj, leaves, "Replicate")
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            columns.append([leaf] * len(team))
        elif leaf.requires_grad and torch.is_grad_enabled():
            columns.append([copies[0] for copies in autograd.broadcast_buckets(team, [leaf])])
        else:
            columns.append(broadcast(leaf, team.devices))
    return [tree.unflatten(iter([column[rank] for column in columns])) for rank in team.ranks]
