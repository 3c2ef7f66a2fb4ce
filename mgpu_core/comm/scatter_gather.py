"""Scatter and its inverse, gather, with the signatures of ``torch.nn.parallel.comm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.comm import collectives
from mgpu_core.comm.arguments import (
    as_list,
    check_joined,
    check_outs,
    destination_of,
    in_range,
    ordinary_list,
    refuse_quantized,
)
from mgpu_core.comm.layout import empty_in_order, memory_order
from mgpu_core.device.devices import DeviceLike
from mgpu_core.device.memory import note_written
from mgpu_core.device.streams import copying_to, hand_over
from mgpu_core.device.team import Team
from mgpu_core.device.tensor_checks import refuse_special
from mgpu_core.record import span

__all__ = ["gather", "scatter"]


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[DeviceLike] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Cuts a tensor along ``dim`` into one chunk per rank, each in fresh memory on its device.

    Args:
        tensor: any dtype but quantized ones, at least one dimension.
        devices: one per rank.
        chunk_sizes: rows of each chunk (default: sizes that differ by at most one; with fewer rows than ranks the
            first ranks get one each and the others none).
        streams: taken for compatibility; the copies are ordered on the current streams.
        out: instead of ``devices``: where to write, one per rank; their sizes along ``dim`` are the chunks.

    Raises:
        RuntimeError: ``out`` together with ``devices`` or ``chunk_sizes``.
        IndexError, TypeError, ValueError: a ``dim`` that is not there, sizes that do not add up, tensors that cannot
            be read or written.
    """
    refuse_special(tensor, "tensor")
    refuse_quantized(tensor, "tensor")
    dim = in_range(dim, tensor.dim())
    if out is not None:
        return _scatter_out(tensor, devices, chunk_sizes, dim, as_list(out, "out"))
    if devices is None:
        raise RuntimeError("Exactly one of 'devices' and 'out' must be specified, but got neither")
    ranks = Team.of(devices).devices
    if chunk_sizes is None:
        chunk_sizes = [count for _, count in _core.chunk_plan(tensor.size(dim), len(ranks)) if count] or [0]
        ranks = ranks[: len(chunk_sizes)]
    if len(chunk_sizes) != len(ranks) or sum(chunk_sizes) != tensor.size(dim) or min(chunk_sizes) < 0:
        raise ValueError(
            f"chunk_sizes must be {len(ranks)} sizes that add up to {tensor.size(dim)}, not {list(chunk_sizes)}"
        )
    return _scatter_new(tensor, ranks, chunk_sizes, dim)


def _scatter_new(
    tensor: torch.Tensor, ranks: Sequence[torch.device], chunk_sizes: Sequence[int], dim: int
) -> tuple[torch.Tensor, ...]:
    with span("scatter"):
        # From the host nobody's work is waited for, so the copies need not stand in line with the ranks' computing.
        from_host = tensor.device.type == "cpu"
        with copying_to(ranks if from_host else []):
            order = memory_order(tensor)
            shapes = [(*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]) for rows in chunk_sizes]
            parts = [empty_in_order(tensor, shape, rank, order) for shape, rank in zip(shapes, ranks, strict=True)]
            collectives.scatter_into(tensor, parts, dim)
        if from_host:
            hand_over(parts)
    return tuple(parts)


def _scatter_out(
    tensor: torch.Tensor, devices: object, chunk_sizes: object, dim: int, out: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    for name, value in (("devices", devices), ("chunk_sizes", chunk_sizes)):
        if value is not None:
            raise RuntimeError(f"'{name}' must not be specified when 'out' is specified, but got {name}={value}")
    check_joined(out, tensor, dim, "out")
    check_outs(out, [tensor])
    with span("scatter"):
        collectives.scatter_into(tensor, out, dim)
        note_written(out)
    return tuple(out)


def gather(
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    destination: DeviceLike | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Joins one tensor per rank along ``dim``, copied straight into the result.

    Args:
        tensors: of one dtype, and one shape but for ``dim``.
        destination: device of the result (default: that of ``tensors[0]``).
        out: instead of ``destination``: where to write.

    Raises:
        RuntimeError: both ``destination`` and ``out``.
        IndexError, TypeError, ValueError: tensors that do not fit, or cannot be read or written.
    """
    parts = ordinary_list(tensors, "tensors")
    dim = in_range(dim, parts[0].dim())
    if out is None:
        return _gather_new(parts, dim, destination_of(destination, parts[0].device))
    if destination is not None:
        raise RuntimeError(
            f"'destination' must not be specified when 'out' is specified, but got destination={destination}"
        )
    check_joined(parts, out, dim, "tensors")
    check_outs([out], parts)
    with span("gather"):
        collectives.gather_into(parts, out, dim)
        note_written([out])
    return out


def _gather_new(parts: list[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    first = parts[0]
    rows = sum(part.size(dim) if part.dim() > dim else 0 for part in parts)
    whole = empty_in_order(first, (*first.shape[:dim], rows, *first.shape[dim + 1 :]), device, memory_order(first))
    check_joined(parts, whole, dim, "tensors")
    with span("gather"):
        collectives.gather_into(parts, whole, dim)
    return whole
