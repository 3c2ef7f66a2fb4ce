"""Collectives over trusted tensors: nothing is checked here, and tensors become pointers.

:mod:`mgpu_core.comm.api` has validated users' tensors; autograd and the step pass tensors of their own.  An input may
be a lazy view or sparse, as gradients are: its dispatch keys say so, and it is resolved.  Tensors that the core can
move go to the core, all others to plain torch.  Autograd is told of tensors that are written in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.comm import layout, torch_backend
from mgpu_core.comm.algorithms import AllReduceAlgorithm
from mgpu_core.comm.layout import Stream
from mgpu_core.comm.packing import groups, kind_of
from mgpu_core.comm.reductions import BETWEEN_GPUS, CORE_DTYPES, check_op, core_count
from mgpu_core.comm.traffic_trace import CollectiveTrace
from mgpu_core.devices.memory import note_written
from mgpu_core.devices.tensor_checks import are_blocks, readable
from mgpu_core.devices.transfer import copying_to, hand_over
from mgpu_core.errors import BackendUnavailable
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer

__all__ = [
    "all_gather_into",
    "all_reduce_into",
    "broadcast",
    "broadcast_into",
    "copies_of",
    "gather",
    "gather_into",
    "reduce_batch",
    "reduce_scatter_into",
    "scatter",
    "scatter_into",
]

Devices: TypeAlias = Sequence[torch.device]
Tensors: TypeAlias = Sequence[torch.Tensor]
Parts: TypeAlias = Sequence[torch.Tensor | None]
Ends: TypeAlias = tuple[Stream, list[Stream]]
"""The streams of the whole tensor or the root, and of the ranks."""
_data_ptr = torch.Tensor.data_ptr
_Pair: TypeAlias = tuple[torch.Tensor, list[torch.Tensor]]


def scatter(tensor: torch.Tensor, devices: Devices, counts: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
    """Return ``counts[rank]`` rows along ``dim`` (not negative) in fresh memory on each rank's device."""
    if tensor.device.type != "cpu" or _are_on_host(devices):
        return _scattered(tensor, devices, counts, dim)
    # Copies from the host wait for no other work, so they need not queue with the ranks' computing.
    with copying_to(devices):
        parts = _scattered(tensor, devices, counts, dim)
    hand_over(parts)
    return parts


def _are_on_host(devices: Devices) -> bool:
    """Return whether all ranks are on the CPU, where there are no streams."""
    return set(map(_type_of, devices)) <= {"cpu"}


_type_of = attrgetter("type")


def _scattered(tensor: torch.Tensor, devices: Devices, counts: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
    order, shape, dtype = layout.memory_order(tensor), [*tensor.shape], tensor.dtype
    parts: tuple[torch.Tensor, ...] = ()
    for rows, device in zip(counts, devices, strict=True):
        shape[dim] = rows
        parts += (torch.empty(shape, dtype=dtype, device=device, memory_format=order or torch.contiguous_format),)
    scatter_into(tensor, parts, dim, order)
    return parts


def scatter_into(whole: torch.Tensor, parts: Tensors, dim: int, order: torch.memory_format | None = None) -> None:
    """Fill the parts from ``whole``, one after the other along ``dim`` (not negative).

    Args:
        order: in which all of them are dense, where that is known.
    """
    whole = readable(whole, "the tensor to scatter")
    order = order or layout.common_order([whole, *parts])
    ends = None if order is None else layout.streams_of_cut(whole, parts, dim, order)
    trace = None if tracer.recording is None else CollectiveTrace("scatter", [parts], [whole])
    with trace or NULL_CONTEXT:
        if ends is None or order is None:
            torch_backend.scatter(whole, parts, dim)
        else:
            about, rows = _transfer(whole, parts, dim, order)
            _core.scatter(about, ends[0], rows, ends[1])
        if trace is not None:
            trace.ran("direct" if ends else torch_backend.ALGORITHM)


def gather(parts: Tensors, dim: int, device: torch.device) -> torch.Tensor:
    """Return the parts joined along ``dim`` (not negative) in fresh memory on ``device``."""
    first, shape = parts[0], [*parts[0].shape]
    shape[dim] = 0
    for part in parts:
        shape[dim] += part.shape[dim]
    order = layout.memory_order(first) or torch.contiguous_format
    whole = torch.empty(shape, dtype=first.dtype, device=device, memory_format=order)
    gather_into(parts, whole, dim)
    return whole


def gather_into(parts: Tensors, whole: torch.Tensor, dim: int) -> None:
    """Fill ``whole`` from the parts, one after the other along ``dim`` (not negative)."""
    if are_blocks(parts) and whole.is_contiguous():
        order: torch.memory_format | None = torch.contiguous_format
    else:
        parts = [readable(part, f"the tensor of rank {rank}") for rank, part in enumerate(parts)]
        order = layout.common_order([whole, *parts])
    ends = None if order is None else layout.streams_of_cut(whole, parts, dim, order)
    trace = None if tracer.recording is None else CollectiveTrace("gather", [parts], [whole])
    with trace or NULL_CONTEXT:
        if ends is None or order is None:
            torch_backend.gather(parts, whole, dim)
        else:
            about, rows = _transfer(whole, parts, dim, order)
            _core.gather(rows, ends[1], about, ends[0])
        if trace is not None:
            trace.ran("direct" if ends else torch_backend.ALGORITHM)


def _transfer(
    whole: torch.Tensor, parts: Tensors, dim: int, order: torch.memory_format
) -> tuple[_core.Layout, list[tuple[int, int]]]:
    """Return the core's arguments for the whole tensor and for each part."""
    outer, inner = layout.runs_along(whole.shape, dim, order)
    rows = [(part.data_ptr(), part.shape[dim]) for part in parts]
    return _core.Layout(whole.data_ptr(), outer, whole.shape[dim], inner * whole.itemsize), rows


def copies_of(tensor: torch.Tensor, devices: Devices) -> list[torch.Tensor]:
    """Return memory for one copy per rank: the tensor itself for rank 0 where it is on that device, else fresh."""
    return [
        tensor if rank == 0 and device == tensor.device else torch.empty_like(tensor, device=device)
        for rank, device in enumerate(devices)
    ]


def broadcast(sources: Tensors, devices: Devices) -> list[list[torch.Tensor]]:
    """Return ``copies[i][rank]`` of each source; rank 0's is the source itself where it is on that device."""
    copies = [copies_of(source, devices) for source in sources]
    broadcast_into(sources, copies, _streams_of_plain(sources, devices))
    return copies


def _streams_of_plain(sources: Tensors, devices: Devices) -> Ends | None:
    """Return the root's stream and one per rank, where all sources are contiguous memory of one device, none empty."""
    if not sources or not are_blocks(sources):
        return None
    device = sources[0].device
    for source in sources:
        if source.device != device or not source.nbytes:
            return None
    return layout.streams_of_root(device, devices)


def broadcast_into(sources: Tensors, copies: Sequence[Tensors], plain: Ends | None = None) -> None:
    """Fill ``copies[i][rank]`` from ``sources[i]``; a copy that is its source itself is left alone.

    Args:
        plain: the streams of the root and the ranks, where all is known to be contiguous memory of one device each.
    """
    trace = None if tracer.recording is None else CollectiveTrace("broadcast", copies, sources)
    with trace or NULL_CONTEXT:
        if plain is not None:
            _broadcast_in_core([*zip(sources, copies, strict=True)], plain)
        is_direct = plain is not None or _broadcast_any(sources, copies)
        if trace is not None:
            trace.ran("direct" if is_direct else torch_backend.ALGORITHM)


def _broadcast_any(sources: Tensors, copies: Sequence[Tensors]) -> bool:
    """Fill the copies, whatever they are; return whether the core has filled some."""
    ours: list[_Pair] = []
    others: list[_Pair] = []
    for i, (given, targets) in enumerate(zip(sources, copies, strict=True)):
        if given.layout is not torch.strided:  # a sparse buffer: torch copies what it is made of
            torch_backend.broadcast(given, targets)
            continue
        source = readable(given, f"tensor {i}")
        pair = source, [source if each is given else each for each in targets]
        if not layout.one_layout([source, *pair[1]]):
            others.append(pair)
        elif source.numel():
            ours.append(pair)
    devices = [[each.device for each in (source, *targets)] for source, targets in ours]
    streams = layout.streams_of_root(devices[0][0], devices[0][1:]) if ours else None
    if streams is None or any(each != devices[0] for each in devices):
        _broadcast_elsewhere(others + ours)
        return False
    _broadcast_in_core(ours, streams)
    _broadcast_elsewhere(others)
    return True


def _broadcast_in_core(pairs: Sequence[tuple[torch.Tensor, Tensors]], streams: Ends) -> None:
    _core.broadcast(
        [source.data_ptr() for source, _ in pairs],
        [list(map(_data_ptr, targets)) for _, targets in pairs],
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
    streams = layout.streams_of_root(device, devices) if devices else None
    trace = None if tracer.recording is None else CollectiveTrace("reduce", resolved)
    with trace or NULL_CONTEXT:
        if streams is None:
            totals, ran = _reduced(resolved, op, device)
        else:
            firsts = [row[0] if row[0] is not None else _first(row) for row in resolved]
            totals, ran = [torch.empty_like(first, device=device) for first in firsts], "direct"
            _reduce_in_core(resolved, totals, op, streams)
        if trace is not None:
            trace.ran(ran, totals)
    return totals


def _first(row: Parts) -> torch.Tensor:
    return next(part for part in row if part is not None)


def _devices_of_plain(parts: Sequence[Parts], default: torch.device) -> list[torch.device] | None:
    """Return each rank's device where all parts are plain contiguous memory of one dtype that the core adds."""
    if not are_blocks([part for row in parts for part in row if part is not None]):
        return None
    devices: list[torch.device | None] = [None] * len(parts[0]) if parts else []
    dtype = None
    for row in parts:
        for rank, part in enumerate(row):
            if part is None:
                continue
            if devices[rank] is None:
                devices[rank], dtype = part.device, dtype or part.dtype
            if part.device != devices[rank] or part.dtype != dtype or not part.nbytes:
                return None
    return [device or default for device in devices] if dtype in CORE_DTYPES else None


def _reduced(resolved: Sequence[Parts], op: str, device: torch.device) -> tuple[list[torch.Tensor], str]:
    """Return the sums, and which way most of them went."""
    totals: list[torch.Tensor] = []
    others: list[int] = []
    batches: dict[torch.dtype, list[int]] = {}
    for i, parts in enumerate(resolved):
        first = _first(parts)
        check_op(op, first.dtype)
        if first.dtype in CORE_DTYPES and layout.for_sum(parts, device):
            totals.append(torch.empty_like(first, device=device))
            if first.numel():
                batches.setdefault(first.dtype, []).append(i)
        else:
            totals.append(first)  # the sum comes below
            others.append(i)
    for batch in batches.values():
        chosen = [resolved[i] for i in batch]
        ranks = [next((each.device for each in row if each is not None), device) for row in zip(*chosen, strict=True)]
        streams = layout.streams_of_root(device, ranks)
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


def _reduce_in_core(parts: Sequence[Parts], outs: Tensors, op: str, streams: Ends) -> None:
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
    parts = [None if part is None else readable(part, f"the tensor of rank {rank}") for rank, part in enumerate(parts)]
    present = [part for part in parts if part is not None]
    if layout.one_layout(present):
        return parts
    return [None if part is None else part.contiguous() for part in parts]


def all_reduce_into(
    tensors: Tensors,
    op: str,
    algorithm: str,
    merge_shared_devices: bool,
    ranks: Sequence[int] | None = None,
    outs: Tensors = (),
) -> str:
    """Reduce in place, or into dense ``outs``; return the algorithm that ran.  ``ranks`` are named in a recording.

    Raises:
        BackendUnavailable: ``nccl`` or ``push`` where it cannot run.
    """
    streams = layout.streams_alike(tensors) if tensors[0].dtype in CORE_DTYPES else None
    if streams is None and algorithm in BETWEEN_GPUS and all(tensor.device.type == "cpu" for tensor in tensors):
        raise BackendUnavailable(f"{algorithm} works between GPUs, and not in host memory")
    others = [outs] if outs else ()
    trace = None if tracer.recording is None else CollectiveTrace("all_reduce", [tensors], others=others, ranks=ranks)
    with trace or NULL_CONTEXT:
        if streams is None:
            torch_backend.all_reduce(tensors, op, outs)
            ran = torch_backend.ALGORITHM
        else:
            first, pointers = tensors[0], [tensor.data_ptr() for tensor in tensors]
            targets = [out.data_ptr() for out in outs] if outs else []
            dtype, count = CORE_DTYPES[first.dtype], core_count(first)
            call = AllReduceAlgorithm(pointers, streams, count, dtype, first.nbytes, op, merge_shared_devices, targets)
            ran = call.run(algorithm)
        if trace is not None:
            trace.ran(ran)
    note_written(outs or tensors)
    return ran


def all_gather_into(parts: Tensors, wholes: Tensors) -> None:
    """Fill each rank's whole with the parts of all ranks, one after the other along dimension 0."""
    streams = layout.streams_joined([*parts, *wholes])
    trace = None if tracer.recording is None else CollectiveTrace("all_gather", [parts], others=[wholes])
    with trace or NULL_CONTEXT:
        if streams is None:
            torch_backend.all_gather(parts, wholes)
        else:
            _core.all_gather(
                [part.data_ptr() for part in parts],
                [part.nbytes for part in parts],
                [whole.data_ptr() for whole in wholes],
                streams[: len(parts)],
            )
        if trace is not None:
            trace.ran("direct" if streams else torch_backend.ALGORITHM)


def reduce_scatter_into(tensors: Tensors, outs: Tensors, op: str, ranks: Sequence[int] | None = None) -> None:
    """Fill rank r's out with chunk r, along dimension 0, of the reduction; ``ranks`` as for an all-reduce."""
    streams = layout.streams_joined([*tensors, *outs]) if outs[0].dtype in CORE_DTYPES else None
    recording = tracer.recording
    trace = None if recording is None else CollectiveTrace("reduce_scatter", [outs], others=[tensors], ranks=ranks)
    with trace or NULL_CONTEXT:
        if streams is None:
            torch_backend.reduce_scatter(tensors, outs, op)
        else:
            _core.reduce_scatter(
                [tensor.data_ptr() for tensor in tensors],
                [out.data_ptr() for out in outs],
                core_count(outs[0]),
                CORE_DTYPES[outs[0].dtype],
                op,
                streams[: len(outs)],
            )
        if trace is not None:
            trace.ran("direct" if streams else torch_backend.ALGORITHM)
