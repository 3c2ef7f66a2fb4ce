"""Collectives over trusted tensors: nothing is checked here, and tensors become pointers.

:mod:`mgpu_core.comm.api` has validated users' tensors; autograd and the step pass tensors of their own.  An input may
be a lazy view or sparse, as gradients are: its dispatch keys say so, and it is resolved.  Tensors that the core can
move go to the core, all others to plain torch.  Autograd is told of tensors that are written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.comm import backends, torch_backend
from mgpu_core.comm.algorithms import AllReduce
from mgpu_core.comm.batches import broadcast, broadcast_into, copies_of, reduce_batch
from mgpu_core.comm.layout import are_blocks, memory_order, runs_along
from mgpu_core.comm.reductions import CORE_DTYPES, core_count
from mgpu_core.comm.traffic_trace import trace_collective
from mgpu_core.devices.memory import note_written
from mgpu_core.devices.tensor_checks import readable
from mgpu_core.devices.transfer import copying_to, hand_over
from mgpu_core.errors import BackendUnavailable
from mgpu_core.ranks.team import Team

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

Tensors: TypeAlias = Sequence[torch.Tensor]


def all_reduce_into(
    tensors: Tensors, op: str, algorithm: str, merge_shared_devices: bool, ranks: Sequence[int] | None = None
) -> str:
    """Reduce in place; return the algorithm that ran.  A recording calls the ranks by ``ranks``.

    Raises:
        BackendUnavailable: ``nccl`` where it cannot run.
    """
    first = tensors[0]
    streams = backends.alike(tensors) if first.dtype in CORE_DTYPES else None
    with trace_collective("all_reduce", [tensors], ranks=ranks) as call:
        if streams is not None:
            pointers = [tensor.data_ptr() for tensor in tensors]
            dtype, count = CORE_DTYPES[first.dtype], core_count(first)
            ran = AllReduce(pointers, streams, count, dtype, first.nbytes, op, merge_shared_devices).run(algorithm)
        else:
            if algorithm == "nccl" and all(tensor.device.type == "cpu" for tensor in tensors):
                raise BackendUnavailable("nccl works between GPUs, and not in host memory")
            torch_backend.all_reduce(tensors, op)
            ran = torch_backend.ALGORITHM
        call.ran(ran)
    note_written(tensors)
    return ran


def scatter(tensor: torch.Tensor, team: Team, counts: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
    """Return ``counts[rank]`` rows along ``dim`` (not negative) in fresh memory on each rank's device."""
    if team.on_host or tensor.device.type != "cpu":
        return _scattered(tensor, team, counts, dim)
    # Copies from the host wait for no other work, so they need not queue with the ranks' computing.
    with copying_to(team.devices):
        parts = _scattered(tensor, team, counts, dim)
    hand_over(parts)
    return parts


def _scattered(tensor: torch.Tensor, team: Team, counts: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
    order, head, tail = memory_order(tensor), tensor.shape[:dim], tensor.shape[dim + 1 :]
    parts = [
        _fresh(tensor, (*head, rows, *tail), device, order) for rows, device in zip(counts, team.devices, strict=True)
    ]
    scatter_into(tensor, parts, dim, order)
    return tuple(parts)


def _fresh(
    tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device, order: torch.memory_format | None
) -> torch.Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=device, memory_format=order or torch.contiguous_format)


def scatter_into(whole: torch.Tensor, parts: Tensors, dim: int, order: torch.memory_format | None = None) -> None:
    """Fill the parts from ``whole``, one after the other along ``dim`` (not negative).

    Args:
        order: in which all of them are dense, where that is known.
    """
    whole = readable(whole, "the tensor to scatter")
    order = order or backends.common_order([whole, *parts])
    ends = None if order is None else backends.cut(whole, parts, dim, order)
    with trace_collective("scatter", [parts], [whole]) as call:
        if ends is not None and order is not None:
            about, rows = _transfer(whole, parts, dim, order)
            _core.scatter(about, ends[0], rows, ends[1])
        else:
            torch_backend.scatter(whole, parts, dim)
        call.ran("direct" if ends is not None else torch_backend.ALGORITHM)


def gather(parts: Tensors, dim: int, device: torch.device) -> torch.Tensor:
    """Return the parts joined along ``dim`` (not negative) in fresh memory on ``device``."""
    first, order = parts[0], memory_order(parts[0])
    rows = 0
    for part in parts:
        rows += part.shape[dim]
    whole = _fresh(first, (*first.shape[:dim], rows, *first.shape[dim + 1 :]), device, order)
    gather_into(parts, whole, dim)
    return whole


def gather_into(parts: Tensors, whole: torch.Tensor, dim: int) -> None:
    """Fill ``whole`` from the parts, one after the other along ``dim`` (not negative)."""
    if are_blocks(parts) and whole.is_contiguous():
        order: torch.memory_format | None = torch.contiguous_format
    else:
        parts = [readable(part, f"the tensor of rank {rank}") for rank, part in enumerate(parts)]
        order = backends.common_order([whole, *parts])
    ends = None if order is None else backends.cut(whole, parts, dim, order)
    with trace_collective("gather", [parts], [whole]) as call:
        if ends is not None and order is not None:
            about, rows = _transfer(whole, parts, dim, order)
            _core.gather(rows, ends[1], about, ends[0])
        else:
            torch_backend.gather(parts, whole, dim)
        call.ran("direct" if ends is not None else torch_backend.ALGORITHM)


def _transfer(
    whole: torch.Tensor, parts: Tensors, dim: int, order: torch.memory_format
) -> tuple[_core.Layout, list[tuple[int, int]]]:
    """Return the core's arguments for the whole tensor and for each part."""
    outer, inner = runs_along(whole.shape, dim, order)
    rows = [(part.data_ptr(), part.shape[dim]) for part in parts]
    return _core.Layout(whole.data_ptr(), outer, whole.shape[dim], inner * whole.itemsize), rows


def all_gather_into(parts: Tensors, wholes: Tensors) -> None:
    """Fill each rank's whole with the parts of all ranks, one after the other along dimension 0."""
    streams = backends.joined([*parts, *wholes])
    with trace_collective("all_gather", [parts], others=[wholes]) as call:
        if streams is not None:
            _core.all_gather(
                [part.data_ptr() for part in parts],
                [part.nbytes for part in parts],
                [whole.data_ptr() for whole in wholes],
                streams[: len(parts)],
            )
        else:
            torch_backend.all_gather(parts, wholes)
        call.ran("direct" if streams is not None else torch_backend.ALGORITHM)


def reduce_scatter_into(tensors: Tensors, outs: Tensors, op: str, ranks: Sequence[int] | None = None) -> None:
    """Fill rank r's out with chunk r, along dimension 0, of the reduction; ``ranks`` as for an all-reduce."""
    streams = backends.joined([*tensors, *outs]) if outs[0].dtype in CORE_DTYPES else None
    with trace_collective("reduce_scatter", [outs], others=[tensors], ranks=ranks) as call:
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
            torch_backend.reduce_scatter(tensors, outs, op)
        call.ran("direct" if streams is not None else torch_backend.ALGORITHM)
