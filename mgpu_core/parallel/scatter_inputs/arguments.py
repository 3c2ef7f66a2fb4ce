"""All arguments together: taken apart into leaves, cut at the same rows, put together again for each rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from mgpu_core.comm import autograd
from mgpu_core.comm.trace_hooks import trace_cut
from mgpu_core.devices.tensor_checks import begin_alike
from mgpu_core.parallel.scatter_inputs.chunks import check_shares, is_plain, row_counts, views_of
from mgpu_core.parallel.scatter_inputs.replicated import copies_for_all, copies_of_tensor, trace_replicated
from mgpu_core.parallel.scatter_inputs.unknown import warn_unknown
from mgpu_core.ranks.team import Team
from mgpu_core.trace.tracer import is_tracing
from mgpu_core.trees.nested import RankParts, Replicate, Rows, flatten, moved

__all__ = ["Arguments", "cut", "sliced", "split_ahead"]


def cut(
    objects: dict[str, Any],
    team: Team,
    dim: int,
    shares: Sequence[float] | None,
    *,
    as_views: bool = False,
    dealt: str | None = None,
) -> tuple[list[list[Any]], list[int] | None]:
    """Per rank its part of each object, and its rows where something was cut.

    Args:
        as_views: chunks on the only device of all ranks need not be memory of their own.
        dealt: the object whose tensors with one number per rank are dealt out, also where the rows are others: so
            transformers' Trainer passes each replica its divisor so, and torch sees no rows in it.
    """
    check_shares(shares, len(team))
    if len(team) == 1:
        trace_replicated(objects, team.devices[0], dim)
        return [[moved(obj, team.devices[0]) for obj in objects.values()]], None
    arguments = Arguments(objects)
    alone = arguments.numbers_per_rank(dealt, len(team), dim)
    rows = arguments.rows(dim, alone)
    counts = None if rows is None else row_counts(rows, len(team), shares)
    if counts is not None:
        arguments.check_parts(team, counts, dim)
        team = team.first(len(counts))
    one_device = team.devices[0] if as_views and len(set(team.devices)) == 1 else None
    columns = []
    for position in range(len(arguments.leaves)):
        if position in alone:
            arguments.leaves[position] = arguments.leaves[position].narrow(dim, 0, len(team))
        each = [1] * len(team) if position in alone else counts
        columns.append(arguments.spread(position, team, each, dim, one_device))
    return [arguments.rebuild([column[rank] for column in columns]) for rank in team.ranks], counts


def split_ahead(obj: Any, team: Team, dim: int, shares: Sequence[float] | None) -> Any:
    """Return a nest whose leaves with rows are :class:`~mgpu_core.trees.nested.RankParts`, cut as :func:`cut` does it.

    Raises:
        TypeError, ValueError: as for :func:`cut`.
    """
    arguments = Arguments({"batch": obj})
    rows = arguments.rows(dim)
    if rows is None:
        return obj
    counts = row_counts(rows, len(team), shares)
    team = team.first(len(counts))
    leaves = list(arguments.leaves)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Rows) or _has_rows(leaf, dim):
            leaves[position] = RankParts(arguments.spread(position, team, counts, dim, None), dim)
    return arguments.rebuild(leaves)[0]


class Arguments:
    """Several objects, taken apart together: they are cut at the same rows."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self.names = list(objects)
        self.leaves: list[Any] = []
        self.trees = [flatten(obj, self.leaves, name, share=True) for name, obj in objects.items()]

    def rebuild(self, leaves: list[Any]) -> list[Any]:
        """Return the objects, with these leaves."""
        rest = iter(leaves)
        return [tree.unflatten(rest) for tree in self.trees]

    def path(self, position: int) -> str:
        """Return the path of the leaf: ``inputs[1]["x"]``."""
        paths = [path for name, tree in zip(self.names, self.trees, strict=True) for path in tree.paths(name)]
        return paths[position]

    def numbers_per_rank(self, name: str | None, ranks: int, dim: int) -> set[int]:
        """Return the leaves of one object that have one number per rank, where other tensors have other rows."""
        sized = {position: leaf for position, leaf in enumerate(self.leaves) if _has_rows(leaf, dim)}
        if name is None or all(leaf.size(dim) == ranks for leaf in sized.values()):
            return set()
        at = self.names.index(name)
        begin, count = (sum(len(tree.paths("")) for tree in trees) for trees in (self.trees[:at], [self.trees[at]]))
        mine = range(begin, begin + count)
        return {
            position for position, leaf in sized.items() if position in mine and leaf.numel() == leaf.size(dim) == ranks
        }

    def rows(self, dim: int, but: Collection[int] = ()) -> int | None:
        """Return the rows along ``dim`` of the first tensor that has some, checked against all others; or None.

        Args:
            but: leaves that are not looked at.
        """
        first: int | None = None
        for position, leaf in enumerate(self.leaves):
            if position in but or not isinstance(leaf, torch.Tensor | Rows | RankParts) or _has_no_dimension(leaf):
                continue
            if isinstance(leaf, torch.Tensor) and not -leaf.dim() <= dim < leaf.dim():
                raise IndexError(
                    f"{self.path(position)} has shape {tuple(leaf.shape)} and cannot be cut along dimension {dim}"
                )
            if first is None:
                first = position
            elif _rows_of(leaf, dim) != _rows_of(self.leaves[first], dim):
                raise ValueError(self._disagreement(first, position, dim))
        return None if first is None else _rows_of(self.leaves[first], dim)

    def check_parts(self, team: Team, counts: list[int], dim: int) -> None:
        """Raise ValueError unless each leaf that is split already is split for this team, along ``dim``."""
        for position, leaf in enumerate(self.leaves):
            if isinstance(leaf, RankParts) and (leaf.counts != counts or leaf.dim != dim or not _are_on(leaf, team)):
                raise ValueError(
                    f"{self.path(position)} is split for other ranks: {leaf.counts} rows along dimension {leaf.dim}, "
                    f"but the ranks on {', '.join(map(str, team.devices))} take {counts} along dimension {dim}: give "
                    "the DeviceLoader the same device_ids, dim and shares"
                )

    def spread(
        self, position: int, team: Team, counts: list[int] | None, dim: int, one_device: torch.device | None
    ) -> Sequence[Any]:
        """Return each rank's part of the leaf: views, if it is plain and on the one device of all ranks."""
        leaf = self.leaves[position]
        warn_unknown(leaf, partial(self.path, position), 0 if counts is None else sum(counts))
        parts: Sequence[Any]
        try:
            if counts is not None and type(leaf) is torch.Tensor and leaf.device == one_device and is_plain(leaf):
                parts = views_of(leaf, counts, dim)
                route = "view" if begin_alike(parts[0], leaf) else "copy"
            else:
                parts, route = _spread(leaf, team, counts, dim), "copy"
            if isinstance(leaf, torch.Tensor) and is_tracing():
                trace_cut("scatter", self.path(position), leaf.device, parts, dim, route if leaf.dim() else "copies")
            return parts
        except (ValueError, TypeError) as error:
            error.add_note(f"while scattering {self.path(position)} along dimension {dim}")
            raise

    def slices(self, counts: list[int], dim: int) -> Iterator[list[Any]]:
        """Yield the objects of each part: views of tensors, and their :class:`Rows`; all else is shared."""
        for position, leaf in enumerate(self.leaves):
            warn_unknown(leaf, partial(self.path, position), sum(counts))
        columns = [sliced(leaf, counts, dim) for leaf in self.leaves]
        return (self.rebuild(list(leaves)) for leaves in zip(*columns, strict=True))

    def _disagreement(self, one: int, other: int, dim: int) -> str:
        paths = [self.path(position) for position in (one, other)]
        described = [
            f"{path} has {_size_of(self.leaves[position])}" for path, position in zip(paths, (one, other), strict=True)
        ]
        advice = self._advice(one, other, dim)
        return f"the inputs differ in their number of rows along dimension {dim}: {', '.join(described)}. {advice}"

    def _advice(self, one: int, other: int, dim: int) -> str:
        """Return what to do about two leaves that differ in their rows."""
        few, many = sorted((one, other), key=lambda position: _rows_of(self.leaves[position], dim))
        if found := "; or ".join(self._ways(few, many, dim)):
            return found
        advice = "What every rank should get whole goes into mgpu_core.Replicate(...)"
        alike = {re.sub(r"\[\d+\]", "[]", self.path(position)) for position in (one, other)}
        if len(alike) == 1 and alike != {"inputs[]"}:  # of one list, not two arguments
            advice += "; a list with one entry per row into mgpu_core.Rows(...)"
        return advice

    def _ways(self, few: int, many: int, dim: int) -> Iterator[str]:
        """Yield how a tensor of few rows and one of many can be passed, as far as their shapes tell."""
        one, other = self.leaves[few], self.leaves[many]
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return
        rows, most = one.size(dim), other.size(dim)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        for axis in range(min(leaf.dim() for leaf in tensors)):
            sizes = {leaf.size(axis) for leaf in tensors}
            if axis != dim and len(sizes) == 1 and sizes != {1}:
                yield (
                    f"All have {sizes.pop()} entries along dimension {axis}: if those are the rows, pass dim={axis} "
                    f"to the wrapper or the step, or --dim {axis} to `mgpu run`"
                )
                break
        for axis, size in enumerate(one.shape):
            if axis != dim and size == most > 1:
                name = self.path(few)
                yield (
                    f"{name} has {most} entries along dimension {axis}: if those are its rows, pass "
                    f"{name}.transpose({dim}, {axis})"
                )
                return
        if 1 < rows < most and most % rows == 0:
            folded = f"{self.path(many)}.unflatten({dim}, ({rows}, {most // rows}))"
            yield (
                f"{self.path(many)} has {most // rows} rows for each of {self.path(few)}: pass {folded}, and flatten "
                "it in the forward"
            )
        elif other.dim() == 1 and any(leaf.shape == (rows,) for leaf in tensors):
            yield "Flat data with a length per row goes into mgpu_core.Rows(x.split(lengths))"


def _has_no_dimension(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0


def _rows_of(leaf: torch.Tensor | Rows[Any] | RankParts, dim: int) -> int:
    if isinstance(leaf, RankParts):
        return sum(leaf.counts)
    return len(leaf) if isinstance(leaf, Rows) else leaf.size(dim)


def _size_of(leaf: torch.Tensor | Rows[Any] | RankParts) -> str:
    return f"shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"{_rows_of(leaf, 0)} rows"


def _are_on(leaf: RankParts, team: Team) -> bool:
    pairs = zip(leaf.parts, team.devices, strict=False)
    return all(isinstance(part, list) or part.device == device for part, device in pairs)


def _deal(rows: Rows[Any], team: Team, counts: list[int]) -> list[list[Any]]:
    """Return each rank's entries, with their tensors on its device."""
    entries = iter(rows)
    pairs = zip(team.devices, counts, strict=True)
    return [[moved(each, device) for each in islice(entries, count)] for device, count in pairs]


def sliced(leaf: Any, counts: list[int], dim: int) -> Sequence[Any]:
    """Return the parts of a leaf: views of a tensor, its :class:`Rows`; anything else is the same in all parts."""
    if isinstance(leaf, Rows):
        entries = iter(leaf)
        return [Rows(islice(entries, count)) for count in counts]
    return leaf.split(counts, dim) if _has_rows(leaf, dim) else [leaf] * len(counts)


def _has_rows(leaf: Any, dim: int) -> bool:
    return isinstance(leaf, torch.Tensor) and -leaf.dim() <= dim < leaf.dim()


def _spread(leaf: Any, team: Team, counts: list[int] | None, dim: int) -> Sequence[Any]:
    if isinstance(leaf, RankParts):
        return leaf.parts
    if isinstance(leaf, Replicate):
        return copies_for_all(leaf.value, team)
    if isinstance(leaf, Rows) and counts is not None:
        return _deal(leaf, team, counts)
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(team)
    if leaf.dim() == 0:
        return copies_of_tensor(leaf, team)
    assert counts is not None  # a tensor with dimensions was seen by rows()
    return autograd.scatter(leaf, team.devices, counts, dim)
