"""Scatter: a nested object becomes one per rank, its tensors cut along ``dim``.

All tensors are cut at the same rows, whatever their shapes, so they must agree on how many there are.  What cannot be
cut goes to every rank: scalars and :class:`~mgpu_core.nested.Replicate` as copies, everything else by reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core import _core
from mgpu_core.comm import autograd
from mgpu_core.comm.broadcast_reduce import copies_of
from mgpu_core.comm.collectives import broadcast_into
from mgpu_core.comm.facts import tell_cut
from mgpu_core.device.devices import DeviceLike
from mgpu_core.device.team import Team
from mgpu_core.nested import Replicate, any_tensor, flatten
from mgpu_core.record import is_on, span, telling

__all__ = ["check_shares", "scatter", "scatter_kwargs", "scatter_objects"]


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
        TypeError: packed sequences, nested, sparse and quantized tensors.
        IndexError: a tensor without dimension ``dim``.
    """
    team = Team.of(target_gpus)
    with span("scatter"):
        parts = [part for (part,) in _cut({"inputs": inputs}, team, dim, shares)[0]]
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
        if len(team) == 1:
            device = team.devices[0]
            if is_on():  # the dictionary costs too
                _tell_whole({"inputs": inputs, "kwargs": kwargs or {}}, device, dim)
            whole = {name: _whole(value, device) for name, value in kwargs.items()} if kwargs else {}
            return (tuple([_whole(value, device) for value in inputs]),), (whole,)
        pairs, _ = _cut({"inputs": tuple(inputs), "kwargs": dict(kwargs or {})}, team, dim, shares)
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def scatter_objects(
    objects: dict[str, Any], team: Team, dim: int = 0, *, shares: Sequence[float] | None = None
) -> tuple[list[list[Any]], list[int]]:
    """:func:`scatter` for several objects that are cut at the same rows; the names are what errors call them.

    Where all ranks are on a tensor's device, and no graph goes through it, their chunks are views of it.

    Returns:
        Per rank its part of each object, and per rank its rows: zeros where no object has any.
    """
    with span("scatter"):
        found = _plain_views(objects, team, dim, shares)
        if found is not None:
            return found
        parts, counts = _cut(objects, team, dim, shares, as_views=True)
        if len(team) == 1:
            counts = [_rows_of(objects, dim)]
    return parts, [0] * len(parts) if counts is None else counts


def _plain_views(
    objects: dict[str, Any], team: Team, dim: int, shares: Sequence[float] | None
) -> tuple[list[list[Any]], list[int]] | None:
    """What most steps are given, bare tensors and tuples of them on the only device: no nest has to be taken apart.

    One rank gets them as they are.  ``None``: it is something else, or wrong.
    """
    tensors: list[torch.Tensor] = []
    for obj in objects.values():
        if type(obj) is not dict or obj:
            tensors += obj if type(obj) is tuple else [obj]
    device = team.devices[0]
    if not tensors or team.devices.count(device) < len(team):
        return None
    for each in tensors:
        if type(each) is not torch.Tensor or each.device != device or not _is_plain(each):
            return None
        if not -each.dim() <= dim < each.dim() or each.size(dim) != tensors[0].size(dim):
            return None
    check_shares(shares, len(team))
    if len(team) == 1:
        _tell_whole(objects, device, dim)
        return [list(objects.values())], [tensors[0].size(dim)]
    counts = _counts(tensors[0].size(dim), len(team), shares)
    columns = [_views(each, counts, dim) for each in tensors]
    if is_on():
        for name, each, views in zip(_names(objects), tensors, columns, strict=True):
            tell_cut("scatter", name, each.device, views, dim, "view")
    return [_in_place_of(objects, list(chunks)) for chunks in zip(*columns, strict=True)], counts


def _names(objects: dict[str, Any]) -> Iterator[str]:
    """What the tensors are called, of bare ones and tuples of them."""
    for name, obj in objects.items():
        if type(obj) is tuple:
            yield from (f"{name}[{place}]" for place in range(len(obj)))
        elif torch.is_tensor(obj):
            yield name


def _in_place_of(objects: dict[str, Any], chunks: list[torch.Tensor]) -> list[Any]:
    """One rank's objects: tensors, tuples and empty dicts as they were, with its chunks."""
    rest = iter(chunks)
    return [
        tuple([next(rest) for _ in obj]) if type(obj) is tuple else next(rest) if torch.is_tensor(obj) else {}
        for obj in objects.values()
    ]


def _rows_of(objects: dict[str, Any], dim: int) -> int:
    """Rows of what one rank gets whole."""
    for obj in objects.values():  # as a rule a bare tensor says it
        first = obj[0] if isinstance(obj, tuple) and obj else obj
        if type(first) is torch.Tensor and first.dim() > dim >= 0:
            return first.size(dim)
    return _Arguments(objects).rows(dim) or 0


def _cut(
    objects: dict[str, Any], team: Team, dim: int, shares: Sequence[float] | None, *, as_views: bool = False
) -> tuple[list[list[Any]], list[int] | None]:
    """Per rank its part of each object, and its rows where something was cut."""
    check_shares(shares, len(team))
    if len(team) == 1:
        _tell_whole(objects, team.devices[0], dim)
        return [[_whole(obj, team.devices[0]) for obj in objects.values()]], None
    arguments = _Arguments(objects)
    rows = arguments.rows(dim)
    counts = None if rows is None else _counts(rows, len(team), shares)
    if counts is not None:
        team = team.first(len(counts))
    one_device = team.devices[0] if as_views and len(set(team.devices)) == 1 else None
    columns = [arguments.spread(place, team, counts, dim, one_device) for place in range(len(arguments.leaves))]
    return [arguments.rebuild([column[rank] for column in columns]) for rank in team.ranks], counts


def check_shares(shares: Sequence[float] | None, ranks: int) -> None:
    """Raises ValueError unless there is one positive number per rank."""
    if shares is None:
        return
    if len(shares) != ranks:
        raise ValueError(f"shares must have one number per rank: {ranks} ranks, {len(shares)} shares")
    for rank, share in enumerate(shares):
        if not 0 < share < float("inf"):
            raise ValueError(f"shares[{rank}] must be a positive number, not {share}; leave the device out instead")


class _Arguments:
    """Several objects, taken apart together: they are cut at the same rows."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self.names = list(objects)
        self.leaves: list[Any] = []
        self.trees = [flatten(obj, self.leaves, name, share=True) for name, obj in objects.items()]

    def rebuild(self, leaves: list[Any]) -> list[Any]:
        """The objects, with these leaves."""
        rest = iter(leaves)
        return [tree.unflatten(rest) for tree in self.trees]

    def path(self, place: int) -> str:
        """What the leaf is called: ``inputs[1]["x"]``."""
        paths = [path for name, tree in zip(self.names, self.trees, strict=True) for path in tree.paths(name)]
        return paths[place]

    def rows(self, dim: int) -> int | None:
        """Rows along ``dim``: of the first tensor that has them, checked against all others; None without one."""
        first: int | None = None
        for place, leaf in enumerate(self.leaves):
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                continue
            if not -leaf.dim() <= dim < leaf.dim():
                raise IndexError(
                    f"{self.path(place)} has shape {tuple(leaf.shape)} and cannot be cut along dimension {dim}"
                )
            if first is None:
                first = place
            elif leaf.size(dim) != self.leaves[first].size(dim):
                raise ValueError(self._disagreement(first, place, dim))
        return None if first is None else int(self.leaves[first].size(dim))

    def spread(
        self, place: int, team: Team, counts: list[int] | None, dim: int, one_device: torch.device | None
    ) -> Sequence[Any]:
        """What each rank gets of the leaf: views, where it is plain and lies on the one device of all ranks."""
        leaf = self.leaves[place]
        parts: Sequence[Any]
        try:
            if counts is not None and type(leaf) is torch.Tensor and leaf.device == one_device and _is_plain(leaf):
                parts, route = _views(leaf, counts, dim), "view"
            else:
                parts, route = _spread(leaf, team, counts, dim), "copy"
            if isinstance(leaf, torch.Tensor) and is_on():
                tell_cut("scatter", self.path(place), leaf.device, parts, dim, route if leaf.dim() else "copies")
            return parts
        except (ValueError, TypeError) as error:
            error.add_note(f"while scattering {self.path(place)} along dimension {dim}")
            raise

    def _disagreement(self, one: int, other: int, dim: int) -> str:
        described = [f"{self.path(place)} has shape {tuple(self.leaves[place].shape)}" for place in (one, other)]
        return (
            f"the inputs differ in their number of rows along dimension {dim}: {', '.join(described)}. "
            "What every rank should get whole goes into mgpu_core.Replicate(...)"
        )


def _counts(rows: int, ranks: int, shares: Sequence[float] | None) -> list[int]:
    """Rows of each rank that works.  Without any rows rank 0 runs once, with none."""
    plan = _core.chunk_plan(rows, ranks) if shares is None else _core.share_plan(rows, list(shares))
    return [count for _, count in plan if count] or [0]


def _spread(leaf: Any, team: Team, counts: list[int] | None, dim: int) -> Sequence[Any]:
    if isinstance(leaf, Replicate):
        return _copies(leaf.value, team)
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(team)
    if leaf.dim() == 0:
        return _copies_of_tensor(leaf, team)
    assert counts is not None  # a tensor with dimensions was seen by rows()
    return autograd.scatter(leaf, team, counts, dim)


def _views(leaf: torch.Tensor, counts: list[int], dim: int) -> list[torch.Tensor]:
    """Chunks without a copy, each with a version of its own: what a rank writes in place is no other rank's write."""
    return [chunk.data for chunk in torch.split_with_sizes(leaf, counts, dim)]


def _is_plain(leaf: torch.Tensor) -> bool:
    """Whether views of it are all that a rank needs; what a scatter refuses is none."""
    return leaf.dim() > 0 and not (leaf.requires_grad or _is_undivided(leaf))


def _is_undivided(leaf: torch.Tensor) -> bool:
    """What a scatter over several ranks refuses."""
    return leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized


def _whole(obj: Any, device: torch.device) -> Any:
    """One rank cuts nothing: everything goes to its device as it is, and what is there already is not even copied."""
    if isinstance(obj, torch.Tensor):
        return obj if obj.device == device else obj.to(device)
    if type(obj) is tuple and all(type(each) is torch.Tensor for each in obj):
        return tuple([_whole(each, device) for each in obj])
    leaves: list[Any] = []
    tree = flatten(obj, leaves, "inputs", whole=True, share=True)
    if not any_tensor(leaves):
        return obj
    moved = [_whole(leaf.value, device) if isinstance(leaf, Replicate) else _moved(leaf, device) for leaf in leaves]
    return tree.unflatten(iter(moved))


@telling
def _tell_whole(objects: dict[str, Any], device: torch.device, dim: int) -> None:
    for name, obj in objects.items():
        leaves: list[Any] = []
        tree = flatten(obj, leaves, name, whole=True, share=True)
        for path, leaf in zip(tree.paths(name), leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and not _is_undivided(leaf) and leaf.dim() > dim >= -leaf.dim():
                tell_cut("scatter", path, leaf.device, [leaf], dim, "whole" if leaf.device == device else "copy")


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor | PackedSequence) and leaf.data.device != device:
        return leaf.to(device)  # type: ignore[arg-type]  # torch's stub forgets devices
    return leaf


def _copies(obj: Any, team: Team) -> list[Any]:
    """The nest whole for every rank: its tensors copied, the rest by reference."""
    leaves: list[Any] = []
    tree = flatten(obj, leaves, "Replicate", whole=True, share=True)
    if not any_tensor(leaves):
        return [obj] * len(team)
    columns = [_copies_of_leaf(leaf, team) for leaf in leaves]
    return [tree.unflatten(iter([column[rank] for column in columns])) for rank in team.ranks]


def _copies_of_leaf(leaf: Any, team: Team) -> Sequence[Any]:
    if isinstance(leaf, Replicate):  # one in another says nothing new, but the module gets bare values
        return _copies(leaf.value, team)
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(team)
    if leaf.is_nested:
        raise TypeError("Replicate(...) holds a nested tensor, which is not one block of memory to copy")
    return _copies_of_tensor(leaf, team)


def _copies_of_tensor(tensor: torch.Tensor, team: Team) -> Sequence[torch.Tensor]:
    """Fresh memory on every rank, rank 0 too: a forward may write to what it is given.  Differentiable."""
    if tensor.requires_grad and torch.is_grad_enabled():
        copies = [row[0] for row in autograd.broadcast_buckets(team, [tensor], numbered=False)]
    else:
        copies = copies_of(tensor, team.devices)
        broadcast_into([tensor], [copies])
    if team.devices[0] == tensor.device:
        copies[0] = copies[0].clone()
    return copies
