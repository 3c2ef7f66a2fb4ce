"""Scatter: the arguments are taken apart once, their tensors are cut, and each rank's are put together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch.nn.utils.rnn import PackedSequence

from mgpu_core import _core
from mgpu_core.comm import autograd, dispatch
from mgpu_core.comm.trace_hooks import trace_cut
from mgpu_core.devices.devices import DeviceLike, as_devices
from mgpu_core.devices.tensor_checks import begin_alike, refuse_special
from mgpu_core.devices.traces import refuse_traces
from mgpu_core.parallel.scatter_inputs.advice import disagreement, rows_of, warn_unknown
from mgpu_core.ranks.team import Team
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span
from mgpu_core.trees.nested import (
    RankParts,
    Replicate,
    Rows,
    any_tensor,
    flatten,
    flatten_named,
    is_undivided,
    moved,
    unflatten_columns,
)

__all__ = [
    "Arguments",
    "check_shares",
    "cut",
    "row_counts",
    "scatter",
    "scatter_kwargs",
    "scatter_objects",
    "split_ahead",
]

Devices: TypeAlias = Sequence[torch.device]
How: TypeAlias = Literal["copy", "view", "keep"]


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
    (parts,), _ = _scattered({"inputs": inputs}, as_devices(target_gpus, "target_gpus"), dim, shares)
    return tuple(parts) if isinstance(inputs, torch.Tensor) else list(parts)


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
    if _get_tracing_state() is not None or _len_torch_dispatch_stack():
        refuse_traces()
    devices = target_gpus.devices if isinstance(target_gpus, Team) else as_devices(target_gpus, "target_gpus")
    if not inputs and not kwargs:
        return (), ()
    if not kwargs:
        (parts,), _ = _scattered({"inputs": tuple(inputs)}, devices, dim, shares)
        return tuple(parts), tuple([{} for _ in parts])
    columns, _ = _scattered({"inputs": tuple(inputs), "kwargs": {**kwargs}}, devices, dim, shares, dealt="kwargs")
    return tuple(columns[0]), tuple(columns[1])


def scatter_objects(
    objects: dict[str, Any],
    devices: Devices,
    dim: int = 0,
    *,
    shares: Sequence[float] | None = None,
    how: Literal["view", "keep"] = "view",
) -> tuple[list[list[Any]], list[int]]:
    """Scatter several objects, named as in errors, at the same rows.

    Args:
        objects, devices, dim, shares: as for :func:`scatter`.
        how: ``view``: where all ranks are on a tensor's device, and no graph goes through it, their chunks are views of
            it.  ``keep``: chunks are views where the tensor is, on whatever device.

    Returns:
        Per rank its part of each object, and per rank its rows: zeros where no object has any.
    """
    columns, counts = _scattered(objects, devices, dim, shares, how=how)
    parts = list(map(list, zip(*columns, strict=True)))
    return parts, [0] * len(parts) if counts is None else counts


def _scattered(
    objects: dict[str, Any],
    devices: Devices,
    dim: int,
    shares: Sequence[float] | None,
    *,
    how: How = "copy",
    dealt: str | None = None,
) -> tuple[list[Sequence[Any]], list[int] | None]:
    """Return of each object one part per rank, and the rows of each rank where something was cut.

    Args:
        how: as :func:`cut`.
        dealt: the object whose tensors with one number per rank are dealt out, also where the rows are others: so
            torch passes each replica its divisor, and sees no rows in it.
    """
    ranks = len(devices)
    if shares is not None:
        check_shares(shares, ranks)
    with NULL_CONTEXT if tracer.sink is None else span("scatter"):
        if ranks == 1:
            return _whole(objects, devices[0], dim, how)
        arguments = Arguments(objects)
        alone = () if dealt is None else arguments.numbers_per_rank(dealt, ranks, dim)
        rows = arguments.rows(dim, alone)
        counts = None if rows is None else row_counts(rows, ranks, shares)
        devices = devices if counts is None else devices[: len(counts)]
        return arguments.spread(cut(arguments, counts, dim, how, devices, alone), len(devices)), counts


def _whole(
    objects: dict[str, Any], device: torch.device, dim: int, how: How
) -> tuple[list[Sequence[Any]], list[int] | None]:
    """Return the objects for the only rank: nothing is cut, and what is on its device is passed on as it is."""
    if how == "keep":
        return [[obj] for obj in objects.values()], [_rows_of(objects, dim)]
    if tracer.recording is not None:
        _trace_whole(objects, device, dim)
    parts: list[Sequence[Any]] = []
    for obj in objects.values():
        parts += ([moved(obj, device)],)
    return parts, [_rows_of(objects, dim)] if how == "view" else None


def _rows_of(objects: dict[str, Any], dim: int) -> int:
    for obj in objects.values():  # as a rule a bare tensor says it
        first = obj[0] if isinstance(obj, tuple) and obj else obj
        if type(first) is torch.Tensor and first.dim() > dim >= 0:
            return first.size(dim)
    return Arguments(objects).rows(dim) or 0


@tracer.when_tracing
def _trace_whole(objects: dict[str, Any], device: torch.device, dim: int) -> None:
    for name, obj in objects.items():
        leaves: list[Any] = []
        tree = flatten(obj, leaves, name, whole=True, share=True)
        for path, leaf in zip(tree.paths(name), leaves, strict=True):
            if _has_rows(leaf, dim) and not is_undivided(leaf):
                trace_cut("scatter", path, leaf.device, [leaf], dim, "whole" if leaf.device == device else "copy")


def cut(
    arguments: Arguments,
    counts: list[int] | None,
    dim: int,
    how: How,
    devices: Devices = (),
    alone: Collection[int] = (),
) -> list[Sequence[Any]]:
    """Cut each leaf at the same rows: whatever cuts a batch ends here.

    Args:
        arguments: of one call.
        counts: the rows of each part; ``None``: no leaf has rows, and each part has all.
        dim: the dimension of the rows.
        how: ``copy``: parts are fresh memory on their devices.  ``view``: the same, but where there is one device,
            parts of a tensor that lies there and has no graph are views of it.  ``keep``: nothing is moved; parts of
            tensors are views with their graph, and leaves without rows are the same in all parts.
        devices: of each part, unless they are kept.
        alone: leaves with one number per rank.

    Returns:
        Of each leaf one part per rank.
    """
    if how == "keep":
        counts = counts or [0] * len(devices)
        return [_kept(arguments, position, counts, dim) for position in range(len(arguments.leaves))]
    viewed = devices[0] if how == "view" and len(set(devices)) == 1 else None
    columns: list[Sequence[Any]] = []
    for position, leaf in enumerate(arguments.leaves):
        parts: Sequence[Any]
        route = "copy"
        try:
            if type(leaf) is not torch.Tensor and not isinstance(leaf, torch.Tensor):
                arguments.warn_unknown(position, 0 if counts is None else sum(counts))
                parts = _parts_of_other(arguments, position, devices, counts, dim)
            elif not leaf.ndim:
                parts, route = _copies_of(leaf, devices), "copies"
            elif position in alone:
                parts = autograd.scatter(leaf.narrow(dim, 0, len(devices)), devices, [1] * len(devices), dim)
            elif counts is not None and type(leaf) is torch.Tensor and leaf.device == viewed and not leaf.requires_grad:
                parts, route = _views_of(leaf, counts, dim), "view"
            else:
                assert counts is not None  # it has rows
                parts = autograd.scatter(leaf, devices, counts, dim)
        except (ValueError, TypeError) as error:
            error.add_note(f"while scattering {arguments.path(position)} along dimension {dim}")
            raise
        if tracer.recording is not None and isinstance(leaf, torch.Tensor):
            route = "copy" if route == "view" and not begin_alike(parts[0], leaf) else route
            trace_cut("scatter", arguments.path(position), leaf.device, parts, dim, route)
        columns += (parts,)
    return columns


def split_ahead(obj: Any, team: Team, dim: int, shares: Sequence[float] | None) -> Any:
    """Return a nest whose leaves with rows are :class:`~mgpu_core.trees.nested.RankParts`, cut as for a wrapper.

    Raises:
        TypeError, ValueError, IndexError: as for :func:`scatter`.
    """
    arguments = Arguments({"batch": obj})
    rows = arguments.rows(dim)
    if rows is None:
        return obj
    counts = row_counts(rows, len(team.devices), shares)
    columns = cut(arguments, counts, dim, "copy", team.devices[: len(counts)])
    return arguments.rebuild(
        [
            RankParts(parts, dim) if isinstance(leaf, Rows) or _has_rows(leaf, dim) else leaf
            for leaf, parts in zip(arguments.leaves, columns, strict=True)
        ]
    )[0]


class Arguments:
    """Several objects, taken apart together: they are cut at the same rows.

    Args:
        objects: by their names in errors.
        share: containers without anything to cut may be the same objects in all parts.

    Attributes:
        leaves: of all objects, one after the other.
        trees: one per object.

    Raises:
        TypeError: packed sequences, nested, sparse and quantized tensors.
    """

    def __init__(self, objects: dict[str, Any], *, share: bool = True) -> None:
        self.leaves: list[Any] = []
        self._names = list(objects)
        self.trees = flatten_named(objects, self.leaves, share=share)

    def rebuild(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the objects, with these leaves."""
        rest = iter(leaves)
        return [tree.unflatten(rest) for tree in self.trees]

    def spread(self, columns: Sequence[Sequence[Any]], ranks: int) -> list[Sequence[Any]]:
        """Return of each object one per rank, with the rank's entry of each column as its leaves."""
        return unflatten_columns(self.trees, columns, ranks)

    def path(self, position: int) -> str:
        """Return the path of the leaf: ``inputs[1]["x"]``."""
        paths = [path for name, tree in zip(self._names, self.trees, strict=True) for path in tree.paths(name)]
        return paths[position]

    def numbers_per_rank(self, name: str, ranks: int, dim: int) -> set[int]:
        """Return the leaves of one object that have one number per rank, where other tensors have other rows."""
        sized = {position: leaf for position, leaf in enumerate(self.leaves) if _has_rows(leaf, dim)}
        if all(leaf.size(dim) == ranks for leaf in sized.values()):
            return set()
        at = self._names.index(name)
        begin, count = (sum(len(tree.paths("")) for tree in trees) for trees in (self.trees[:at], [self.trees[at]]))
        mine = range(begin, begin + count)
        return {
            position for position, leaf in sized.items() if position in mine and leaf.numel() == leaf.size(dim) == ranks
        }

    def rows(self, dim: int, but: Collection[int] = ()) -> int | None:
        """Return the rows along ``dim`` of the first leaf that has some, checked against all others; or ``None``.

        Args:
            but: leaves that are not looked at.

        Raises:
            ValueError: leaves that differ in their rows.
            IndexError: a tensor without dimension ``dim``.
        """
        first = rows = None
        for position, leaf in enumerate(self.leaves):
            if position in but:
                continue
            if type(leaf) is torch.Tensor or isinstance(leaf, torch.Tensor):
                if not leaf.ndim:
                    continue
                if not -leaf.ndim <= dim < leaf.ndim:
                    raise IndexError(
                        f"{self.path(position)} has shape {tuple(leaf.shape)} and cannot be cut along dimension {dim}"
                    )
                size = leaf.shape[dim]
            elif isinstance(leaf, Rows | RankParts):
                size = rows_of(leaf, dim)
            else:
                continue
            if first is None:
                first, rows = position, size
            elif size != rows:
                raise ValueError(disagreement(self.leaves, self.path, (first, position), dim))
        return rows

    def warn_unknown(self, position: int, rows: int) -> None:
        """Warn once of a leaf of which nothing is cut although something in it has rows, or tensors."""
        warn_unknown(self.leaves[position], partial(self.path, position), rows)

    def slices(self, counts: list[int], dim: int) -> Iterator[tuple[Any, ...]]:
        """Yield the objects of each part, cut where they are: :func:`cut` says how."""
        return zip(*self.spread(cut(self, counts, dim, "keep"), len(counts)), strict=True)


def _has_rows(leaf: Any, dim: int) -> bool:
    """Return whether it is a tensor with dimension ``dim``."""
    return isinstance(leaf, torch.Tensor) and -leaf.dim() <= dim < leaf.dim()


def _kept(arguments: Arguments, position: int, counts: list[int], dim: int) -> Sequence[Any]:
    """Return the parts of a leaf on the device where it is: views with its graph, or its :class:`Rows`."""
    leaf = arguments.leaves[position]
    if _has_rows(leaf, dim):
        return leaf.split(counts, dim)  # type: ignore[no-any-return]
    arguments.warn_unknown(position, sum(counts))
    entries = iter(leaf) if isinstance(leaf, Rows) else None
    return [leaf if entries is None else Rows(islice(entries, count)) for count in counts]


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


def _views_of(leaf: torch.Tensor, counts: list[int], dim: int) -> list[torch.Tensor]:
    """Return chunks without a copy, each with a version of its own: ranks may write theirs in place.

    Where the tensor is contiguous and a chunk would not be (``dim=1``), the chunk is copied, as between devices.
    """
    chunks: Iterable[torch.Tensor] = torch.split_with_sizes(leaf, counts, dim)
    if dim and leaf.is_contiguous():
        chunks = map(torch.Tensor.contiguous, chunks)
    return list(map(_data_of, chunks))


_data_of = attrgetter("data")


def _parts_of_other(
    arguments: Arguments, position: int, devices: Devices, counts: list[int] | None, dim: int
) -> Sequence[Any]:
    """Return each rank's part of a leaf that is no tensor."""
    leaf = arguments.leaves[position]
    if isinstance(leaf, RankParts):
        on = [
            device if isinstance(part, list) else part.device for part, device in zip(leaf.parts, devices, strict=False)
        ]
        if leaf.counts != counts or leaf.dim != dim or on != [*devices]:
            raise ValueError(
                f"{arguments.path(position)} is split for other ranks: {leaf.counts} rows along dimension {leaf.dim}, "
                f"but the ranks on {', '.join(map(str, devices))} take {counts} along dimension {dim}: give the "
                "DeviceLoader the same device_ids, dim and shares"
            )
        return leaf.parts
    if isinstance(leaf, Replicate):
        return _copies_for_all(leaf.value, devices)
    if isinstance(leaf, Rows) and counts is not None:
        entries = iter(leaf)
        pairs = zip(devices, counts, strict=True)
        return [[moved(each, device) for each in islice(entries, count)] for device, count in pairs]
    return [leaf] * len(devices)


def _copies_for_all(obj: Any, devices: Devices) -> Sequence[Any]:
    """Return the nest whole for every rank: its tensors copied, the rest by reference."""
    leaves: list[Any] = []
    tree = flatten(obj, leaves, "Replicate", whole=True, share=True)
    if not any_tensor(leaves):
        return [obj] * len(devices)
    return unflatten_columns([tree], [_copies_of_leaf(leaf, devices) for leaf in leaves], len(devices))[0]


def _copies_of_leaf(leaf: Any, devices: Devices) -> Sequence[Any]:
    if isinstance(leaf, Replicate):  # one in another says nothing new, but the module gets bare values
        return _copies_for_all(leaf.value, devices)
    if isinstance(leaf, Rows):
        return _copies_for_all(list(leaf), devices)
    if isinstance(leaf, PackedSequence):
        return _copies_of_packed(leaf, devices)
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(devices)
    if leaf.is_nested:
        raise TypeError("Replicate(...) holds a nested tensor, which is not one block of memory to copy")
    return _copies_of(leaf, devices)


def _copies_of_packed(packed: PackedSequence, devices: Devices) -> list[PackedSequence]:
    """Return copies of a packed sequence; its sizes stay on the host, where torch needs them."""
    parts = packed.data, packed.sorted_indices, packed.unsorted_indices
    columns = [[None] * len(devices) if part is None else _copies_of(part, devices) for part in parts]
    return [PackedSequence(data, packed.batch_sizes.clone(), *order) for data, *order in zip(*columns, strict=True)]


def _copies_of(tensor: torch.Tensor, devices: Devices) -> Sequence[torch.Tensor]:
    """Copy into fresh memory on every rank, rank 0 too, since a forward may write to its inputs.  Differentiable."""
    if tensor.requires_grad and torch.is_grad_enabled():
        copies = [row[0] for row in autograd.broadcast_buckets(devices, [tensor], numbered=False)]
    else:
        refuse_special(tensor, "Replicate(...)", sparse=True)
        copies = dispatch.broadcast([tensor], devices)[0]
    if devices[0] == tensor.device:
        copies[0] = copies[0].clone()
    return copies
