"""What the collectives' functions check of their arguments before anything is allocated or written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_core.device.devices import DeviceLike, as_device
from mgpu_core.device.shared_memory import check_disjoint
from mgpu_core.device.tensor_checks import check_writable, refuse_special

__all__ = ["as_list", "check_joined", "check_outs", "destination_of", "in_range", "ordinary_list", "refuse_quantized"]


def as_list(tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
    """One tensor per rank, at least one."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{what} is a sequence with one tensor per rank, not a tensor")
    made = list(tensors)
    if not made:
        raise ValueError(f"{what} is empty: one tensor per rank is wanted")
    for rank, tensor in enumerate(made):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what}[{rank}] must be a tensor, not {type(tensor).__name__}")
    return made


def ordinary_list(tensors: Sequence[torch.Tensor], what: str, *, sparse: bool = False) -> list[torch.Tensor]:
    """One tensor per rank, each of which has one block of memory, or is sparse where that is allowed."""
    made = as_list(tensors, what)
    for rank, tensor in enumerate(made):
        refuse_special(tensor, f"{what}[{rank}]", sparse=sparse)
    return made


def check_outs(outs: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    """Raises unless each may be written, and none shares memory with another or partly with what is read."""
    check_writable(outs, "out[{}]".format)
    check_disjoint(outs, "out[{}]".format, read)


def in_range(dim: int, dims: int) -> int:
    """``dim`` counted from the front; IndexError as torch words it."""
    if not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")
    return dim % dims


def destination_of(destination: DeviceLike | None, default: torch.device) -> torch.device:
    """The device that is wanted, or the default."""
    return default if destination is None else as_device(destination)


def refuse_quantized(tensor: torch.Tensor, name: str) -> None:
    """Raises TypeError at a tensor that is more than its numbers, of which none can be cut off or put to others."""
    if tensor.is_quantized:
        raise TypeError(f"{name} is quantized, and other numbers may have another scale: use .dequantize()")


def check_joined(parts: Sequence[torch.Tensor], whole: torch.Tensor, dim: int, what: str) -> None:
    """Raises ValueError unless the parts, joined along ``dim``, have the shape and dtype of the whole."""
    for rank, part in enumerate(parts):
        refuse_quantized(part, f"{what}[{rank}]")
        wanted = (*whole.shape[:dim], part.size(dim) if part.dim() > dim else 0, *whole.shape[dim + 1 :])
        if tuple(part.shape) != wanted or part.dtype != whole.dtype:
            raise ValueError(
                f"{what}[{rank}] is {tuple(part.shape)} {part.dtype}, which does not fit {tuple(whole.shape)} "
                f"{whole.dtype} along dimension {dim}"
            )
    rows = sum(part.size(dim) for part in parts)
    if rows != whole.size(dim):
        raise ValueError(f"{what} has {rows} rows along dimension {dim} together, wanted {whole.size(dim)}")
