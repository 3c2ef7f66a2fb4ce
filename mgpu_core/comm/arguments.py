"""Checks of the collectives' arguments, before anything is allocated or written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_core.comm.reductions import check_op
from mgpu_core.devices.devices import DeviceLike, as_device
from mgpu_core.devices.shared_memory import check_disjoint
from mgpu_core.devices.tensor_checks import check_alike, check_writable, readable, refuse_special

__all__ = [
    "as_list",
    "check_equal_sizes",
    "check_joined",
    "check_outs",
    "destination_of",
    "in_range",
    "ordinary_list",
    "rank_name",
    "readable_list",
    "refuse_quantized",
]

rank_name = "the tensor of rank {}".format


def as_list(tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
    """Return a list with one tensor per rank, at least one."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{what} is a sequence with one tensor per rank, not a tensor")
    tensors = list(tensors)
    if not tensors:
        raise ValueError(f"{what} is empty: one tensor per rank is wanted")
    for rank, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what}[{rank}] must be a tensor, not {type(tensor).__name__}")
    return tensors


def ordinary_list(tensors: Sequence[torch.Tensor], what: str, *, sparse: bool = False) -> list[torch.Tensor]:
    """Return one tensor per rank, each of which has one block of memory, or is sparse where that is allowed."""
    tensors = as_list(tensors, what)
    for rank, tensor in enumerate(tensors):
        refuse_special(tensor, f"{what}[{rank}]", sparse=sparse)
    return tensors


def readable_list(tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
    """Return one tensor per rank, each plain memory: conjugation and negation are carried out."""
    return [readable(tensor, rank_name(rank)) for rank, tensor in enumerate(ordinary_list(tensors, what))]


def check_equal_sizes(inputs: Sequence[torch.Tensor]) -> None:
    """Raise ValueError, in torch's words, unless all have the first one's shape and dtype."""
    for i, tensor in enumerate(inputs):
        if tensor.shape != inputs[0].shape:
            got, expected = ("x".join(map(str, each.shape)) for each in (tensor, inputs[0]))
            raise ValueError(f"input {i} has invalid size: got {got}, but expected {expected}")
    check_alike(inputs, inputs[0].shape, inputs[0].dtype)
    check_op("sum", inputs[0].dtype)


def check_outs(outs: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    """Raise unless each may be written, and none overlaps another, or partly overlaps an input."""
    check_writable(outs, "out[{}]".format)
    check_disjoint(outs, "out[{}]".format, read)


def in_range(dim: int, dims: int) -> int:
    """``dim`` counted from the front; IndexError as torch words it."""
    if not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")
    return dim % dims


def destination_of(destination: DeviceLike | None, default: torch.device) -> torch.device:
    """Return the device that is wanted, or the default."""
    return default if destination is None else as_device(destination)


def refuse_quantized(tensor: torch.Tensor, name: str) -> None:
    """Raise TypeError at a tensor that is more than its numbers, of which none can be cut off or put to others."""
    if tensor.is_quantized:
        raise TypeError(f"{name} is quantized, and other numbers may have another scale: use .dequantize()")


def check_joined(
    parts: Sequence[torch.Tensor], dim: int, what: str, whole: torch.Tensor | None = None
) -> tuple[int, ...]:
    """Return the shape of the parts joined along ``dim`` (not negative).

    Raises:
        ValueError: parts that do not fit the first one, or the whole where there is one.
        TypeError: a quantized part.
    """
    like = parts[0] if whole is None else whole
    head, tail, rows = like.shape[:dim], like.shape[dim + 1 :], 0
    for rank, part in enumerate(parts):
        shape = part.shape
        if part.is_quantized:
            refuse_quantized(part, f"{what}[{rank}]")
        if shape[:dim] != head or shape[dim + 1 :] != tail or part.ndim != like.ndim or part.dtype != like.dtype:
            raise ValueError(_misfit(parts, rank, dim, what, whole))
        rows += shape[dim]
    if whole is not None and rows != whole.shape[dim]:
        raise ValueError(f"{what} has {rows} rows along dimension {dim} together, wanted {whole.size(dim)}")
    return (*head, rows, *tail)


def _misfit(parts: Sequence[torch.Tensor], rank: int, dim: int, what: str, whole: torch.Tensor | None) -> str:
    name, like = (f"{what}[0]", parts[0]) if whole is None else ("the output", whole)
    return (
        f"{what}[{rank}] is {tuple(parts[rank].shape)} {parts[rank].dtype}, which does not fit {name}, "
        f"{tuple(like.shape)} {like.dtype}, along dimension {dim}"
    )
