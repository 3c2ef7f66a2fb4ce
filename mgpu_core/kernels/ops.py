"""The public kernel functions: they check, allocate, and call the kernel of the backend where the tensors are.

Arguments are torch tensors, or arrays of cupy, numba and numpy over whose memory a tensor can be made.  Work on a GPU
is put on the device's current stream; a device that the core has no backend for is served by plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.devices.dtypes import FLOATING, REAL
from mgpu_core.devices.memory import note_written
from mgpu_core.devices.shared_memory import check_disjoint
from mgpu_core.devices.streams import core_stream
from mgpu_core.kernels import reference
from mgpu_core.kernels.tensor_arguments import (
    as_out,
    as_tensor,
    as_tensors,
    check_floating,
    check_like,
    check_outs,
    on_one_device,
    with_memory,
)
from mgpu_core.trace.tracer import span

__all__ = ["gather_rows", "pack", "scale_cast", "sum_ranks", "unpack"]

OPS = ("sum", "avg", "prod", "min", "max")


def gather_rows(
    rows: Any,
    index: Any,
    *,
    scale: float = 1 / 255,
    shift: float = 0.0,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cut a batch from a tensor of bytes and normalises it: ``rows[index] * scale + shift``.

    One pass over memory instead of the three of indexing, conversion and arithmetic.

    Args:
        rows: uint8, ``(count, *shape)``.
        index: int64, ``(batch,)``, on the device of ``rows``; each in ``[0, count)``.  On a GPU an index out of range
            gives a row of NaN, because the host does not wait for it.
        scale, shift: applied in float32.
        dtype: of the result: float32, float16 or bfloat16 (rounded once).
        out: where to write, ``(batch, *shape)``; fresh memory if not given.

    Returns:
        ``(batch, *shape)``, of ``dtype``, on the device of ``rows``.

    Raises:
        TypeError: a dtype that is not named above.
        ValueError: another shape, device or layout; on the CPU an index out of range (then nothing is written).
    """
    rows, index = as_tensor(rows, "rows"), as_tensor(index, "index")
    if rows.dtype != torch.uint8 or index.dtype != torch.int64:
        raise TypeError(f"rows must be uint8 and index int64, not {rows.dtype} and {index.dtype}")
    if dtype not in FLOATING or dtype == torch.float64:
        raise TypeError(f"dtype must be one of float32, float16, bfloat16, not {dtype}")
    if rows.dim() == 0 or index.dim() != 1:
        raise ValueError(
            f"rows must be (count, *shape) and index (batch,), not {tuple(rows.shape)} and {tuple(index.shape)}"
        )
    on_one_device(rows=rows, index=index)
    out = _out(out, (index.numel(), *rows.shape[1:]), dtype, rows.device, [rows, index])
    with span("gather_rows"):
        _gather_rows(rows, index, scale, shift, out)
    return out


def _gather_rows(rows: torch.Tensor, index: torch.Tensor, scale: float, shift: float, out: torch.Tensor) -> None:
    stream = core_stream(rows.device)
    if stream is None:
        out.copy_(reference.gather_rows(rows, index, scale=scale, shift=shift, dtype=out.dtype))
        return
    _core.gather_rows(
        (rows.data_ptr(), rows.shape[0], prod(rows.shape[1:])),
        (index.data_ptr(), index.numel()),
        scale,
        shift,
        out.data_ptr(),
        FLOATING[out.dtype],
        stream,
    )
    note_written([out])


def scale_cast(
    tensor: Any, scale: float = 1.0, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``tensor * scale`` in another dtype, in one pass over memory.

    Args:
        tensor: float16, bfloat16, float32 or float64, any shape.
        scale: applied in float32 (float64 where a float64 takes part).
        dtype: of the result (default: the tensor's); rounded once.
        out: where to write, of the tensor's shape; the tensor itself where the dtype is its own.

    Raises:
        TypeError: a dtype that is not named above.
        ValueError: an ``out`` of another shape, dtype or device, or one that partly shares the tensor's memory.
    """
    tensor = as_tensor(tensor, "tensor")
    dtype = tensor.dtype if dtype is None else dtype
    check_floating("scale_cast", tensor.dtype, dtype)
    out = _out(out, tensor.shape, dtype, tensor.device, [tensor])
    stream = core_stream(tensor.device)
    with span("scale_cast"):
        if stream is None:
            out.copy_(reference.scale_cast(tensor, scale, dtype))
            return out
        names = FLOATING[tensor.dtype], FLOATING[dtype]
        _core.scale_cast(tensor.data_ptr(), names[0], out.data_ptr(), names[1], tensor.numel(), scale, stream)
        note_written([out])
    return out


def pack(
    tensors: Sequence[Any], *, dtype: torch.dtype | None = None, scale: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Lay many tensors end to end in a flat one, scaled and cast on the way.

    Args:
        tensors: of one dtype and device, any shapes.  Of float16, bfloat16, float32 and float64 where there is a scale
            or a cast; else of any dtype that the core knows.
        dtype: of the result (default: the tensors'); rounded once.
        scale: applied in float32 (float64 where a float64 takes part).
        out: where to write, ``(total count,)``.

    Raises:
        TypeError: a dtype that is not named above.
        ValueError: tensors of several dtypes or devices; an ``out`` that does not fit or shares their memory.
    """
    sources, pointers, counts = with_memory(tensors, "tensors")
    dtype = sources[0].dtype if dtype is None else dtype
    _check_cast("pack", sources[0].dtype, dtype, scale)
    pieces = _core.Pieces(pointers, counts, REAL[sources[0].dtype])
    out = _out(out, (pieces.count,), dtype, sources[0].device, sources, pieces)
    stream = core_stream(out.device)
    with span("pack"):
        if stream is None:
            out.copy_(reference.pack(sources, scale, dtype))
            return out
        _core.pack(pieces, out.data_ptr(), REAL[dtype], scale, stream)
        note_written([out])
    return out


def unpack(flat: Any, outs: Sequence[torch.Tensor], *, scale: float = 1.0) -> None:
    """Fill tensors, one after the other, from a flat one: the inverse of :func:`pack`.

    Args:
        flat: ``(total count,)``.
        outs: of one dtype, on the device of ``flat``.
        scale: as in :func:`pack`.

    Raises:
        TypeError, ValueError: as :func:`pack`; also tensors that do not have ``flat``'s elements together.
    """
    flat = as_tensor(flat, "flat")
    targets, pointers, counts = with_memory(outs, "outs", written=True)
    _check_cast("unpack", flat.dtype, targets[0].dtype, scale)
    on_one_device(flat=flat, outs=targets[0])
    pieces = _core.Pieces(pointers, counts, REAL[targets[0].dtype])
    check_like(flat, "flat", (pieces.count,), flat.dtype)
    if pieces.touches(flat.data_ptr(), flat.nbytes) or not pieces.are_apart():
        check_disjoint(targets, lambda position: f"outs[{position}]", [flat])
    stream = core_stream(flat.device)
    with span("unpack"):
        if stream is None:
            torch._foreach_copy_(targets, reference.unpack(flat, targets, scale))
            return
        _core.unpack(pieces, flat.data_ptr(), REAL[flat.dtype], scale, stream)
        note_written(targets)


def sum_ranks(tensors: Sequence[Any], op: str = "sum", *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Combine many tensors of one device: each element is read once from each and written once.

    Args:
        tensors: of one shape, dtype (float16, bfloat16, float32, float64, int32, int64, uint8) and device.
        op: ``sum``, ``avg``, ``prod``, ``min`` or ``max``, in the order of the list; half precision in float32,
            rounded once; integers wrap, their ``avg`` is cut toward zero; NaN wins in ``min`` and ``max``.
        out: where to write, of the same shape and dtype; one of the tensors itself is allowed.

    Raises:
        TypeError: a dtype that is not named above.
        ValueError: another op; tensors that differ; an ``out`` that does not fit or partly shares their memory.
    """
    sources = as_tensors(tensors, "tensors")
    first = sources[0]
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}")
    if first.dtype not in REAL:
        raise TypeError(f"sum_ranks works on {', '.join(REAL.values())}, not on {first.dtype}")
    for position, tensor in enumerate(sources):
        check_like(tensor, f"tensors[{position}]", first.shape, first.dtype)
    out = _out(out, first.shape, first.dtype, first.device, sources)
    stream = core_stream(first.device)
    with span("sum_ranks"):
        if stream is None:
            out.copy_(reference.sum_ranks(sources, op))
            return out
        pointers = [tensor.data_ptr() for tensor in sources]
        _core.sum_ranks(pointers, [out.data_ptr()], first.numel(), REAL[first.dtype], op, stream)
        note_written([out])
    return out


def _check_cast(what: str, source: torch.dtype, target: torch.dtype, scale: float) -> None:
    if source != target or scale != 1:
        check_floating(f"{what} with a scale or a cast", source, target)
    elif source not in REAL:
        raise TypeError(f"{what} works on {', '.join(REAL.values())}, not on {source}")


def _out(
    out: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    read: Sequence[torch.Tensor],
    pieces: _core.Pieces | None = None,
) -> torch.Tensor:
    """Return where to write: fresh memory, or an ``out`` that fits and shares no memory with an input, or is one.

    Args:
        pieces: the inputs, where they are many.
    """
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    target: torch.Tensor = out if isinstance(out, torch.Tensor) else as_out(out, "out")
    fits = (tuple(target.shape), target.dtype, target.device) == (tuple(shape), dtype, device)
    if not fits or not target.is_contiguous():
        raise ValueError(
            f"out must be contiguous {tuple(shape)} {dtype} on {device}, not {tuple(target.shape)} {target.dtype} on "
            f"{target.device}"
        )
    is_apart = pieces is not None and not pieces.touches(target.data_ptr(), target.nbytes)
    check_outs([target], ["out"], [] if is_apart else read)
    return target
