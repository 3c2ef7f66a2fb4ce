"""The public kernel functions: they check, allocate, and call the kernel of the room where the tensors are."""

from __future__ import annotations

import torch

from mgpu_core import _core
from mgpu_core.device.memory import note_written
from mgpu_core.kernels import reference
from mgpu_core.record import span

__all__ = ["gather_rows"]

_FLOATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def gather_rows(
    rows: torch.Tensor,
    index: torch.Tensor,
    *,
    scale: float = 1 / 255,
    shift: float = 0.0,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cuts a batch from a tensor of bytes and normalises it: ``rows[index] * scale + shift``.

    One pass over memory instead of the three of indexing, conversion and arithmetic.  On the CPU a kernel of this
    package shared by its threads; elsewhere plain torch on the tensors' current stream.

    Args:
        rows: uint8, ``(count, *shape)``, contiguous.
        index: int64, ``(batch,)``, on the device of ``rows``; each in ``[0, count)``.
        scale, shift: applied in float32.
        dtype: of the result: float32, float16 or bfloat16 (rounded once).
        out: where to write, ``(batch, *shape)``, contiguous; fresh memory if not given.

    Returns:
        ``(batch, *shape)``, of ``dtype``, on the device of ``rows``.

    Raises:
        TypeError: a dtype that is not named above.
        ValueError: another shape, device or layout; an index out of range (then nothing is written).
    """
    _check(rows, index, dtype)
    shape = (index.numel(), *rows.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=rows.device)
    elif out.shape != shape or out.dtype != dtype or out.device != rows.device or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {shape} {dtype} on {rows.device}, not {tuple(out.shape)} {out.dtype} on "
            f"{out.device}"
        )
    with span("gather_rows"):
        _fill(rows, index, scale, shift, out)
    return out


def _check(rows: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> None:
    if rows.dtype != torch.uint8 or index.dtype != torch.int64:
        raise TypeError(f"rows must be uint8 and index int64, not {rows.dtype} and {index.dtype}")
    if dtype not in _FLOATS:
        raise TypeError(f"dtype must be one of {', '.join(_FLOATS.values())}, not {dtype}")
    if rows.dim() == 0 or index.dim() != 1 or not rows.is_contiguous():
        raise ValueError(
            f"rows must be contiguous (count, *shape) and index (batch,), not {tuple(rows.shape)} and "
            f"{tuple(index.shape)}"
        )
    if rows.device != index.device:
        raise ValueError(f"rows and index must be on one device, not {rows.device} and {index.device}")


def _fill(rows: torch.Tensor, index: torch.Tensor, scale: float, shift: float, out: torch.Tensor) -> None:
    if rows.device.type != "cpu":
        out.copy_(reference.gather_rows(rows, index, scale=scale, shift=shift, dtype=out.dtype))
        return
    index = index.contiguous()
    count = rows.shape[0]
    _core.gather_rows(
        (rows.data_ptr(), count, rows[0].numel() if count else 0),
        (index.data_ptr(), index.numel()),
        scale,
        shift,
        out.data_ptr(),
        _FLOATS[out.dtype],
    )
    note_written([out])
