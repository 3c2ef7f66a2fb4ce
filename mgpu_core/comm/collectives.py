"""The gate: the only file of the road that turns tensors into pointers.

Lists of tensors in, one entry per rank.  What the core can move goes to the core; everything else goes to the generic
room.  Everything is checked before anything is written, and autograd is told of every write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.comm import generic, rooms
from mgpu_core.comm.algorithms import AllReduce
from mgpu_core.comm.layout import memory_order, one_layout, runs_along
from mgpu_core.comm.packing import groups, kind_of
from mgpu_core.comm.reductions import CORE_DTYPES, check_op, core_count
from mgpu_core.comm.watch import watched
from mgpu_core.device.memory import note_written
from mgpu_core.device.shared_memory import check_disjoint
from mgpu_core.device.tensor_checks import check_alike, check_writable, readable
from mgpu_core.errors import BackendUnavailable

__all__ = [
    "all_gather_into",
    "all_reduce_into",
    "broadcast_into",
    "gather_into",
    "reduce_batch",
    "reduce_scatter_into",
    "scatter_into",
]

Tensors: TypeAlias = Sequence[torch.Tensor]
Parts: TypeAlias = Sequence[torch.Tensor | None]


_rank_name = "the tensor of rank {}".format


def all_reduce_into(
    tensors: Tensors, op: str, algorithm: str, merge_shared_devices: bool, ranks: Sequence[int] | None = None
) -> str:
    """In place; returns the algorithm that ran.  A recording calls the ranks by ``ranks``."""
    check_writable(tensors, _rank_name)
    first = tensors[0]
    check_alike(tensors, first.shape, first.dtype)
    check_op(op, first.dtype, algorithm)
    check_disjoint(tensors, _rank_name)
    streams = rooms.alike(tensors) if first.dtype in CORE_DTYPES else None
    with watched("all_reduce", [tensors], ranks=ranks) as watch:
        if streams is not None:
            pointers = [tensor.data_ptr() for tensor in tensors]
            dtype, count = CORE_DTYPES[first.dtype], core_count(first)
            ran = AllReduce(pointers, streams, count, dtype, first.nbytes, op, merge_shared_devices).run(algorithm)
        else:
            if algorithm == "nccl" and all(tensor.device.type == "cpu" for tensor in tensors):
                raise BackendUnavailable("nccl works between GPUs, and not in host memory")
            generic.all_reduce(tensors, op)
            ran = generic.ALGORITHM
        watch.ran(ran)
    note_written(tensors)
    return ran


def broadcast_into(sources: Tensors, copies: Sequence[Tensors]) -> None:
    """Fills ``copies[i][rank]`` from ``sources[i]``; a copy that is its source itself is left alone."""
    with watched("broadcast", copies, sources) as watch:
        watch.ran(_broadcast(sources, copies))


def _broadcast(sources: Tensors, copies: Sequence[Tensors]) -> str:
    """Says which way most of it went."""
    ours: list[_Pair] = []
    others: list[_Pair] = []
    for i, (given, made) in enumerate(zip(sources, copies, strict=True)):
        if given.layout is not torch.strided:  # a sparse buffer: torch copies what it is made of
            generic.broadcast(given, made)
            continue
        source = readable(given, f"tensor {i}")
        pair = source, [source if each is given else each for each in made]
        if not one_layout([source, *pair[1]]):
            others.append(pair)
        elif source.numel():
            ours.append(pair)
    asked = len(ours)
    left = _broadcast_in_core(ours)
    _broadcast_elsewhere(others + left)
    return "direct" if asked > len(left) else generic.ALGORITHM


_Pair: TypeAlias = tuple[torch.Tensor, list[torch.Tensor]]


def _broadcast_in_core(pairs: Sequence[_Pair]) -> list[_Pair]:
    """In one call, where one room serves all of them; returns those that are left."""
    if not pairs:
        return []
    devices = [[each.device for each in (source, *made)] for source, made in pairs]
    streams = rooms.root_and_ranks(devices[0])
    if streams is None or any(each != devices[0] for each in devices):
        return list(pairs)
    _core.broadcast(
        [source.data_ptr() for source, _ in pairs],
        [[each.data_ptr() for each in made] for _, made in pairs],
        [source.nbytes for source, _ in pairs],
        *streams,
    )
    return []


def _broadcast_elsewhere(pairs: Sequence[_Pair]) -> None:
    """By the generic room; many small tensors of the same kind in one message."""
    packs, alone = groups(range(len(pairs)), lambda i: kind_of([pairs[i][0], *pairs[i][1]], pairs[i][0]))
    for pack in packs:
        generic.broadcast_packed([pairs[i][0] for i in pack], [pairs[i][1] for i in pack])
    for i in alone:
        generic.broadcast(*pairs[i])


def reduce_batch(parts: Sequence[Parts], op: str, device: torch.device) -> list[torch.Tensor]:
    """Sums of many tensors at once: ``parts[i][rank]``, of one shape and dtype per i, to fresh tensors on ``device``.

    ``None`` stands for a rank that adds nothing to that sum; at least one adds something.  Sparse tensors are summed
    by torch.
    """
    resolved = [_resolve(each) for each in parts]
    with watched("reduce", resolved) as watch:
        totals, ran = _reduced(resolved, op, device)
        watch.ran(ran, totals)
    return totals


def _reduced(resolved: Sequence[Parts], op: str, device: torch.device) -> tuple[list[torch.Tensor], str]:
    """The sums, and which way most of them went."""
    totals: list[torch.Tensor] = []
    others: list[int] = []
    batches: dict[torch.dtype, list[int]] = {}
    for i, each in enumerate(resolved):
        first = next(part for part in each if part is not None)
        check_op(op, first.dtype)
        if first.dtype in CORE_DTYPES and rooms.for_sum(each, device):
            totals.append(torch.empty_like(first, device=device))
            if first.numel():
                batches.setdefault(first.dtype, []).append(i)
        else:
            totals.append(first)  # its place; the sum comes below
            others.append(i)
    for batch in batches.values():
        _reduce_in_core([resolved[i] for i in batch], [totals[i] for i in batch], op)
    for i, total in _reduced_elsewhere(resolved, others, op, device):
        totals[i] = total
    return totals, "direct" if batches else generic.ALGORITHM


def _reduced_elsewhere(
    parts: Sequence[Parts], places: Sequence[int], op: str, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """By the generic room, place by place; many small tensors of the same kind in one message."""
    packs, alone = groups(places, lambda i: kind_of(parts[i]))
    for pack in packs:
        whole = [[part for part in parts[i] if part is not None] for i in pack]
        yield from zip(pack, generic.reduce_packed(whole, op, device), strict=True)
    for i in alone:
        yield i, generic.reduce(parts[i], op, device)


def _reduce_in_core(parts: Sequence[Parts], outs: Tensors, op: str) -> None:
    devices = [outs[0].device] * len(parts[0])  # of a rank that adds nothing anywhere, whatever it is
    for each in parts:
        devices = [device if part is None else part.device for part, device in zip(each, devices, strict=True)]
    streams = rooms.root_and_ranks([outs[0].device, *devices])
    assert streams is not None  # rooms.for_sum said so, of each
    root, ranks = streams
    _core.reduce(
        [[0 if part is None else part.data_ptr() for part in each] for each in parts],
        [out.data_ptr() for out in outs],
        [core_count(out) for out in outs],
        CORE_DTYPES[outs[0].dtype],
        op,
        ranks,
        root,
    )


def _resolve(parts: Parts) -> Parts:
    """Readable, and all in the layout of the first that has a dense one, else contiguous."""
    if any(part is not None and part.layout is not torch.strided for part in parts):
        return parts
    found = [None if part is None else readable(part, _rank_name(rank)) for rank, part in enumerate(parts)]
    present = [part for part in found if part is not None]
    if one_layout(present):
        return found
    return [None if part is None else part.contiguous() for part in found]


def scatter_into(whole: torch.Tensor, parts: Tensors, dim: int) -> None:
    """Fills the parts from ``whole``, one behind the other along ``dim`` (not negative)."""
    whole = readable(whole, "the tensor to scatter")
    ends = rooms.cut(whole, parts, dim)
    with watched("scatter", [parts], [whole]) as watch:
        if ends is not None:
            place, rows = _transfer(whole, parts, dim)
            _core.scatter(place, ends[0], rows, ends[1])
        else:
            generic.scatter(whole, parts, dim)
        watch.ran("direct" if ends is not None else generic.ALGORITHM)


def gather_into(parts: Tensors, whole: torch.Tensor, dim: int) -> None:
    """Fills ``whole`` from the parts, one behind the other along ``dim`` (not negative)."""
    parts = [readable(part, _rank_name(rank)) for rank, part in enumerate(parts)]
    ends = rooms.cut(whole, parts, dim)
    with watched("gather", [parts], [whole]) as watch:
        if ends is not None:
            place, rows = _transfer(whole, parts, dim)
            _core.gather(rows, ends[1], place, ends[0])
        else:
            generic.gather(parts, whole, dim)
        watch.ran("direct" if ends is not None else generic.ALGORITHM)


_Whole: TypeAlias = tuple[int, int, int, int]
_Parts: TypeAlias = list[tuple[int, int]]


def _transfer(whole: torch.Tensor, parts: Tensors, dim: int) -> tuple[_Whole, _Parts]:
    order = memory_order(whole)
    assert order is not None  # rooms.cut said so
    outer, inner = runs_along(whole.shape, dim, order)
    rows = [(part.data_ptr(), part.size(dim)) for part in parts]
    return (whole.data_ptr(), outer, whole.size(dim), inner * whole.element_size()), rows


def all_gather_into(parts: Tensors, wholes: Tensors) -> None:
    """Fills each rank's whole with the parts of all ranks, one behind the other along dimension 0."""
    parts = [readable(part, _rank_name(rank)) for rank, part in enumerate(parts)]
    streams = rooms.joined([*parts, *wholes])
    with watched("all_gather", [parts], others=[wholes]) as watch:
        if streams is not None:
            _core.all_gather(
                [part.data_ptr() for part in parts],
                [part.nbytes for part in parts],
                [whole.data_ptr() for whole in wholes],
                streams[: len(parts)],
            )
        else:
            generic.all_gather(parts, wholes)
        watch.ran("direct" if streams is not None else generic.ALGORITHM)


def reduce_scatter_into(tensors: Tensors, outs: Tensors, op: str, ranks: Sequence[int] | None = None) -> None:
    """Fills rank r's out with chunk r, along dimension 0, of the reduction; ``ranks`` as for an all-reduce."""
    tensors = [readable(tensor, _rank_name(rank)) for rank, tensor in enumerate(tensors)]
    check_op(op, outs[0].dtype)
    streams = rooms.joined([*tensors, *outs]) if outs[0].dtype in CORE_DTYPES else None
    with watched("reduce_scatter", [outs], others=[tensors], ranks=ranks) as watch:
        if streams is not None:
            _core.reduce_scatter(
                [tensor.data_ptr() for tensor in tensors],
                [out.data_ptr() for out in outs],
                core_count(outs[0]),
                CORE_DTYPES[outs[0].dtype],
                op,
                streams[: len(outs)],
            )
        else:
            generic.reduce_scatter(tensors, outs, op)
        watch.ran("direct" if streams is not None else generic.ALGORITHM)
