"""The generic backend: any devices, by plain torch copies and adds.

It serves all cases that no other backend does: accelerators without a backend of their own, teams that mix devices,
dtypes that the core does not add, tensors that are not one dense block, sparse gradients.  Slower, same results: sums
in rank order, half precision added in float32 and rounded once; and as little of it is part of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_core import _core
from mgpu_core.comm.layout import nbytes_of
from mgpu_core.comm.packing import flat, unpack_into
from mgpu_core.comm.traffic_trace import trace_hop
from mgpu_core.devices.transfer import copy_into, to_device
from mgpu_core.kernels.reference import average_of

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "broadcast_packed",
    "count",
    "gather",
    "reduce",
    "reduce_packed",
    "reduce_scatter",
    "scatter",
]

ALGORITHM = "generic"
_HALF = (torch.float16, torch.bfloat16)


def count(operation: str, tensors: Sequence[torch.Tensor | None]) -> None:
    """Add one call per rank that has a tensor, of its bytes, to ``_core.counters()``."""
    for rank, tensor in enumerate(tensors):
        if tensor is not None:
            _core.count(operation, ALGORITHM, rank, nbytes_of(tensor))


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in the order of the devices' streams; a copy to the host, which has none, is waited for."""
    copy_into(target, source)
    trace_hop(False, [source], [target])


def _add_up(parts: Sequence[torch.Tensor], op: str, device: torch.device) -> torch.Tensor:
    if op in ("sum", "avg") and all(part.is_complex() and part.layout is torch.strided for part in parts):
        # Half by half, as the core does: torch multiplies what it adds by a one that is complex, and inf by its zero.
        halves = [torch.view_as_real(part.resolve_conj()) for part in parts]
        return torch.view_as_complex(_add_up(halves, op, device))
    wide = torch.float32 if parts[0].dtype in _HALF else parts[0].dtype
    combine = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    total = to_device(parts[0], device, wide)
    for part in parts[1:]:
        total = combine(total, to_device(part, device, wide))
    return (average_of(total, len(parts)) if op == "avg" else total).to(parts[0].dtype)


@torch.no_grad()
def reduce(parts: Sequence[torch.Tensor | None], op: str, device: torch.device) -> torch.Tensor:
    """Return the reduction of one tensor per rank as a fresh tensor on ``device``; ``None`` adds nothing."""
    count("reduce", parts)
    present = [part for part in parts if part is not None]
    if any(part.layout is torch.strided for part in present):  # sparse on some ranks only
        present = [part if part.layout is torch.strided else part.to_dense() for part in present]
    total = _add_up(present, op, device)
    total = total.clone() if len(present) == 1 else total
    trace_hop(True, present, [total])
    return total


@torch.no_grad()
def reduce_packed(parts: Sequence[Sequence[torch.Tensor]], op: str, device: torch.device) -> list[torch.Tensor]:
    """Reduce many small tensors, ``parts[i][rank]``, dense and of one dtype, in one message per rank."""
    rows = [flat(row) for row in zip(*parts, strict=True)]
    count("reduce", rows)
    totals = [torch.empty_like(each[0], device=device) for each in parts]
    unpack_into(_add_up(rows, op, device), totals)
    for sources, total in zip(parts, totals, strict=True):
        trace_hop(True, sources, [total])
    return totals


@torch.no_grad()
def broadcast_packed(sources: Sequence[torch.Tensor], copies: Sequence[Sequence[torch.Tensor]]) -> None:
    """Fill ``copies[i][rank]`` from many small ``sources[i]``, dense and of one dtype, in one message per rank."""
    buffer = flat(sources)
    for rank, targets in enumerate(zip(*copies, strict=True)):
        if targets[0] is not sources[0]:
            unpack_into(to_device(buffer, targets[0].device), targets)
            for source, target in zip(sources, targets, strict=True):
                trace_hop(False, [source], [target])
            _core.count("broadcast", ALGORITHM, rank, buffer.nbytes)


@torch.no_grad()
def all_reduce(tensors: Sequence[torch.Tensor], op: str, outs: Sequence[torch.Tensor] = ()) -> None:
    """Reduce in place, or into ``outs``: all to the first tensor's device, then from there to all."""
    count("all_reduce", tensors)
    total = _add_up(tensors, op, tensors[0].device)
    trace_hop(True, tensors, [total])
    for tensor in outs or tensors:
        _fill(tensor, total)


@torch.no_grad()
def broadcast(source: torch.Tensor, copies: Sequence[torch.Tensor]) -> None:
    """Fill the copies, one per rank; one that is the source itself is left alone."""
    for rank, copy in enumerate(copies):
        if copy is not source:
            _fill(copy, source)
            _core.count("broadcast", ALGORITHM, rank, nbytes_of(copy))


@torch.no_grad()
def scatter(whole: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> None:
    """Fill the parts from ``whole``, one after the other along ``dim``."""
    count("scatter", parts)
    for part, source in zip(parts, whole.split([part.size(dim) for part in parts], dim), strict=True):
        _fill(part, source)


@torch.no_grad()
def gather(parts: Sequence[torch.Tensor], whole: torch.Tensor, dim: int) -> None:
    """Fill ``whole`` with the parts, one after the other along ``dim``."""
    count("gather", parts)
    for part, rows in zip(parts, whole.split([part.size(dim) for part in parts], dim), strict=True):
        _fill(rows, part)


@torch.no_grad()
def all_gather(parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor]) -> None:
    """Fill each rank's whole with all the parts along dimension 0."""
    count("all_gather", parts)
    for whole in wholes:
        for part, rows in zip(parts, whole.split([part.size(0) for part in parts]), strict=True):
            _fill(rows, part)


@torch.no_grad()
def reduce_scatter(tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], op: str) -> None:
    """Fill rank r's out with chunk r of the reduction along dimension 0."""
    count("reduce_scatter", outs)
    columns = [tensor.split([out.size(0) for out in outs]) for tensor in tensors]
    for rank, out in enumerate(outs):
        parts = [column[rank] for column in columns]
        total = _add_up(parts, op, out.device)
        trace_hop(True, parts, [total])
        _fill(out, total)
