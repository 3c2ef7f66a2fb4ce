"""Broadcasts and sums of many trusted tensors at once; part of :mod:`mgpu_core.comm.dispatch`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch._C import _dispatch_keys

from mgpu_core import _core
from mgpu_core.comm import backends, torch_backend
from mgpu_core.comm.layout import are_blocks, one_layout
from mgpu_core.comm.packing import groups, kind_of
from mgpu_core.comm.reductions import CORE_DTYPES, check_op
from mgpu_core.comm.traffic_trace import trace_collective
from mgpu_core.devices.tensor_checks import plain_keys, readable
from mgpu_core.ranks.team import Team

__all__ = ["broadcast", "broadcast_into", "copies_of", "reduce_batch"]

Tensors: TypeAlias = Sequence[torch.Tensor]
Parts: TypeAlias = Sequence[torch.Tensor | None]
_Pair: TypeAlias = tuple[torch.Tensor, list[torch.Tensor]]


def copies_of(tensor: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Return memory for one copy per rank: the tensor itself for rank 0 where it is on that device, else fresh."""
    return [
        tensor if rank == 0 and device == tensor.device else torch.empty_like(tensor, device=device)
        for rank, device in enumerate(devices)
    ]


def broadcast(sources: Tensors, team: Team) -> list[list[torch.Tensor]]:
    """Return ``copies[i][rank]`` of each source; rank 0's is the source itself where it is on that device."""
    copies = [copies_of(source, team.devices) for source in sources]
    with trace_collective("broadcast", copies, sources) as call:
        streams = _streams_of_plain(sources, team)
        if streams is not None:
            _broadcast_in_core([*zip(sources, copies, strict=True)], streams)
            call.ran("direct")
        else:
            call.ran(_broadcast(sources, copies))
    return copies


def _streams_of_plain(sources: Tensors, team: Team) -> tuple[backends.Stream, list[backends.Stream]] | None:
    """Return the root's stream and one per rank, where all sources are contiguous memory of one device, none empty."""
    if not sources or not are_blocks(sources):
        return None
    device = sources[0].device
    for each in sources:
        if each.device != device or not each.nbytes:
            return None
    return backends.root_and_ranks(device, team.devices)


def broadcast_into(sources: Tensors, copies: Sequence[Tensors]) -> None:
    """Fill ``copies[i][rank]`` from ``sources[i]``; a copy that is its source itself is left alone."""
    with trace_collective("broadcast", copies, sources) as call:
        call.ran(_broadcast(sources, copies))


def _broadcast(sources: Tensors, copies: Sequence[Tensors]) -> str:
    """Fill the copies, whatever they are; return the algorithm of most of them."""
    ours: list[_Pair] = []
    others: list[_Pair] = []
    for i, (given, made) in enumerate(zip(sources, copies, strict=True)):
        if given.layout is not torch.strided:  # a sparse buffer: torch copies what it is made of
            torch_backend.broadcast(given, made)
            continue
        source = readable(given, f"tensor {i}")
        pair = source, [source if each is given else each for each in made]
        if not one_layout([source, *pair[1]]):
            others.append(pair)
        elif source.numel():
            ours.append(pair)
    devices = [[each.device for each in (source, *made)] for source, made in ours]
    streams = backends.root_and_ranks(devices[0][0], devices[0][1:]) if ours else None
    if streams is None or any(each != devices[0] for each in devices):
        _broadcast_elsewhere(others + ours)
        return torch_backend.ALGORITHM
    _broadcast_in_core(ours, streams)
    _broadcast_elsewhere(others)
    return "direct"


def _broadcast_in_core(pairs: Sequence[_Pair], streams: tuple[backends.Stream, list[backends.Stream]]) -> None:
    begins = [source.data_ptr() for source, _ in pairs]
    _core.broadcast(
        begins,
        [
            [begin if each is source else each.data_ptr() for each in made]
            for begin, (source, made) in zip(begins, pairs, strict=True)
        ],
        [source.nbytes for source, _ in pairs],
        *streams,
    )


def _broadcast_elsewhere(pairs: Sequence[_Pair]) -> None:
    """Broadcast by plain torch; many small tensors of the same kind go in one message."""
    packs, alone = groups(range(len(pairs)), lambda i: kind_of([pairs[i][0], *pairs[i][1]], pairs[i][0]))
    for pack in packs:
        torch_backend.broadcast_packed([pairs[i][0] for i in pack], [pairs[i][1] for i in pack])
    for i in alone:
        torch_backend.broadcast(*pairs[i])


def reduce_batch(parts: Sequence[Parts], op: str, device: torch.device) -> list[torch.Tensor]:
    """Return the sums of many tensors at once: ``parts[i][rank]``, alike per i, as fresh tensors on ``device``.

    ``None`` stands for a rank that adds nothing to that sum; at least one adds something.  Sparse tensors are summed
    by torch.
    """
    devices = _devices_of_plain(parts, device)
    resolved = parts if devices else [_resolve(each) for each in parts]
    with trace_collective("reduce", resolved) as call:
        streams = backends.root_and_ranks(device, devices) if devices else None
        if streams is None:
            totals, ran = _reduced(resolved, op, device)
        else:
            firsts = [row[0] if row[0] is not None else _first(row) for row in parts]
            totals, ran = [torch.empty_like(first, device=device) for first in firsts], "direct"
            _reduce_in_core(parts, totals, op, streams)
        call.ran(ran, totals)
    return totals


def _first(row: Parts) -> torch.Tensor:
    return next(part for part in row if part is not None)


def _devices_of_plain(parts: Sequence[Parts], default: torch.device) -> list[torch.device] | None:
    """Return each rank's device where all parts are plain contiguous memory of one dtype that the core adds."""
    devices: list[torch.device | None] = [None] * len(parts[0]) if parts else []
    dtype, plain, kind = None, frozenset[int](), ""
    for row in parts:
        for rank, part in enumerate(row):
            if part is None:
                continue
            if devices[rank] is None:
                devices[rank], dtype = part.device, dtype or part.dtype
            if part.device.type != kind:
                kind = part.device.type
                plain = plain_keys(kind)
            if _dispatch_keys(part).raw_repr() not in plain or not part.is_contiguous():
                return None
            if part.device != devices[rank] or part.dtype != dtype or not part.nbytes:
                return None
    return [device or default for device in devices] if dtype in CORE_DTYPES else None


def _reduced(resolved: Sequence[Parts], op: str, device: torch.device) -> tuple[list[torch.Tensor], str]:
    """Return the sums, and which way most of them went."""
    totals: list[torch.Tensor] = []
    others: list[int] = []
    batches: dict[torch.dtype, list[int]] = {}
    for i, each in enumerate(resolved):
        first = _first(each)
        check_op(op, first.dtype)
        if first.dtype in CORE_DTYPES and backends.for_sum(each, device):
            totals.append(torch.empty_like(first, device=device))
            if first.numel():
                batches.setdefault(first.dtype, []).append(i)
        else:
            totals.append(first)  # the sum comes below
            others.append(i)
    for batch in batches.values():
        chosen = [resolved[i] for i in batch]
        ranks = [next((each.device for each in row if each is not None), device) for row in zip(*chosen, strict=True)]
        streams = backends.root_and_ranks(device, ranks)
        assert streams is not None  # for_sum said so, of each
        _reduce_in_core(chosen, [totals[i] for i in batch], op, streams)
    for i, total in _reduced_elsewhere(resolved, others, op, device):
        totals[i] = total
    return totals, "direct" if batches else torch_backend.ALGORITHM


def _reduced_elsewhere(
    parts: Sequence[Parts], indices: Sequence[int], op: str, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Reduce by plain torch, one after the other; many small tensors of the same kind go in one message."""
    packs, alone = groups(indices, lambda i: kind_of(parts[i]))
    for pack in packs:
        whole = [[part for part in parts[i] if part is not None] for i in pack]
        yield from zip(pack, torch_backend.reduce_packed(whole, op, device), strict=True)
    for i in alone:
        yield i, torch_backend.reduce(parts[i], op, device)


def _reduce_in_core(
    parts: Sequence[Parts], outs: Tensors, op: str, streams: tuple[backends.Stream, list[backends.Stream]]
) -> None:
    pairs = 2 if outs[0].dtype.is_complex else 1  # a complex number is two numbers
    _core.reduce(
        [[0 if part is None else part.data_ptr() for part in each] for each in parts],
        [out.data_ptr() for out in outs],
        [out.nbytes // out.itemsize * pairs for out in outs],
        CORE_DTYPES[outs[0].dtype],
        op,
        streams[1],
        streams[0],
    )


def _resolve(parts: Parts) -> Parts:
    """Return the parts readable, and all in the layout of the first that has a dense one, else contiguous."""
    if any(part is not None and part.layout is not torch.strided for part in parts):
        return parts
    found = [None if part is None else readable(part, f"the tensor of rank {rank}") for rank, part in enumerate(parts)]
    present = [part for part in found if part is not None]
    if one_layout(present):
        return found
    return [None if part is None else part.contiguous() for part in found]
