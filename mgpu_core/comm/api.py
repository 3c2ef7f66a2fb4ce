"""The public collectives of ``torch.nn.parallel.comm``, with its signatures: each checks its arguments once.

They validate, and call :mod:`mgpu_core.comm.dispatch`, which validates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.comm import dispatch
from mgpu_core.comm.arguments import (
    as_list,
    check_equal_sizes,
    check_joined,
    check_outs,
    destination_of,
    in_range,
    ordinary_list,
    refuse_quantized,
)
from mgpu_core.comm.buckets import DEFAULT_NBYTES, bucket_positions
from mgpu_core.devices.devices import DeviceLike, as_devices
from mgpu_core.devices.memory import note_written
from mgpu_core.devices.tensor_checks import check_alike, refuse_special
from mgpu_core.trace.tracer import span

__all__ = [
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "reduce_add",
    "reduce_add_coalesced",
    "scatter",
]


def broadcast(
    tensor: torch.Tensor,
    devices: Sequence[DeviceLike] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copy a tensor to every rank.

    Args:
        tensor: any shape and dtype; sparse too, but with ``out``.
        devices: one per rank.  Rank 0 gets the tensor itself if it is on that device already.
        out: instead of ``devices``: where to write, one per rank, of the tensor's shape and dtype.

    Raises:
        RuntimeError: both or none of ``devices`` and ``out``.
        TypeError, ValueError: tensors that cannot be read or written; ``out`` that does not fit.
    """
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got devices={devices} and out={out}"
        )
    with span("broadcast"):
        refuse_special(tensor, "tensor", sparse=out is None)
        if devices is not None:
            return tuple(dispatch.broadcast([tensor], as_devices(devices, "devices"))[0])
        assert out is not None
        refuse_quantized(tensor, "tensor")  # what is written would have codes alone, and another scale
        copies = as_list(out, "out")
        check_alike(copies, tensor.shape, tensor.dtype)
        check_outs([each for each in copies if each is not tensor], [tensor])
        dispatch.broadcast_into([tensor], [copies])
        note_written([each for each in copies if each is not tensor])
        return tuple(copies)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[DeviceLike], buffer_size: int = DEFAULT_NBYTES
) -> list[list[torch.Tensor]]:
    """Copy many tensors to every rank: ``result[rank][i]``; see :func:`broadcast`.

    Args:
        buffer_size: bytes that travel together.
    """
    tensors = ordinary_list(tensors, "tensors", sparse=True)
    ranks = as_devices(devices, "devices")
    copies: list[list[torch.Tensor]] = [[]] * len(tensors)
    with span("broadcast"):
        for bucket in bucket_positions(tensors, buffer_size):
            for i, row in zip(bucket, dispatch.broadcast([tensors[i] for i in bucket], ranks), strict=True):
                copies[i] = row
    return [[each[rank] for each in copies] for rank in range(len(ranks))]


def reduce_add(inputs: Sequence[torch.Tensor], destination: DeviceLike | None = None) -> torch.Tensor:
    """Add one tensor per rank, in rank order; half precision is added in float32 and rounded once.

    Args:
        inputs: of one shape and dtype, strided or sparse.
        destination: device of the result (default: that of ``inputs[0]``).

    Returns:
        The sum as a fresh tensor.

    Raises:
        TypeError, ValueError: tensors of several shapes or dtypes, or of a dtype that cannot be added.
    """
    return reduce_add_coalesced([[tensor] for tensor in as_list(inputs, "inputs")], destination)[0]


def reduce_add_coalesced(
    inputs: Sequence[Sequence[torch.Tensor]], destination: DeviceLike | None = None, buffer_size: int = DEFAULT_NBYTES
) -> tuple[torch.Tensor, ...]:
    """Add many tensors, ``inputs[rank][i]`` over the ranks; see :func:`reduce_add`.

    Args:
        buffer_size: bytes that travel together.
    """
    counts = [len(each) for each in inputs]
    if len(set(counts)) > 1:
        raise ValueError(f"every rank must bring as many tensors, but inputs have {counts}")
    parts = [list(each) for each in zip(*inputs, strict=True)]
    if not counts:
        raise ValueError("inputs is empty: one list of tensors per rank is wanted")
    if not parts:
        return ()
    for tensors in parts:
        check_equal_sizes(ordinary_list(tensors, "inputs", sparse=True))
    device = destination_of(destination, parts[0][0].device)
    totals: dict[int, torch.Tensor] = {}
    with span("reduce"):
        for bucket in bucket_positions([each[0] for each in parts], buffer_size):
            totals.update(zip(bucket, dispatch.reduce_batch([parts[i] for i in bucket], "sum", device), strict=True))
    return tuple(totals[i] for i in range(len(parts)))


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[DeviceLike] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Cut a tensor along ``dim`` into one chunk per rank, each in fresh memory on its device.

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
    ranks = as_devices(devices, "devices")
    if chunk_sizes is None:
        chunk_sizes = [count for _, count in _core.chunk_plan(tensor.size(dim), len(ranks)) if count] or [0]
        ranks = ranks[: len(chunk_sizes)]
    if len(chunk_sizes) != len(ranks) or sum(chunk_sizes) != tensor.size(dim) or min(chunk_sizes) < 0:
        raise ValueError(
            f"chunk_sizes must be {len(ranks)} sizes that add up to {tensor.size(dim)}, not {list(chunk_sizes)}"
        )
    with span("scatter"):
        return dispatch.scatter(tensor, ranks, chunk_sizes, dim)


def _scatter_out(
    tensor: torch.Tensor, devices: object, chunk_sizes: object, dim: int, out: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    for name, value in (("devices", devices), ("chunk_sizes", chunk_sizes)):
        if value is not None:
            raise RuntimeError(f"'{name}' must not be specified when 'out' is specified, but got {name}={value}")
    check_joined(out, dim, "out", tensor)
    check_outs(out, [tensor])
    with span("scatter"):
        dispatch.scatter_into(tensor, out, dim)
        note_written(out)
    return tuple(out)


def gather(
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    destination: DeviceLike | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Join one tensor per rank along ``dim``, copied straight into the result.

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
        check_joined(parts, dim, "tensors")
        with span("gather"):
            return dispatch.gather(parts, dim, destination_of(destination, parts[0].device))
    if destination is not None:
        raise RuntimeError(
            f"'destination' must not be specified when 'out' is specified, but got destination={destination}"
        )
    check_joined(parts, dim, "tensors", out)
    check_outs([out], parts)
    with span("gather"):
        dispatch.gather_into(parts, out, dim)
        note_written([out])
    return out
