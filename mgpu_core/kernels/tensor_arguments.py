"""Checks of the kernel functions' arguments, before anything is allocated or written."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.devices.dtypes import FLOATING
from mgpu_core.devices.shared_memory import check_disjoint
from mgpu_core.devices.streams import GPU_BACKEND, HOST, core_stream
from mgpu_core.devices.tensor_checks import check_writable, memory_of, plain_memory, readable
from mgpu_core.devices.traces import refuse_traces

__all__ = [
    "as_out",
    "as_tensor",
    "as_tensors",
    "check_floating",
    "check_like",
    "check_outs",
    "on_one_device",
    "with_memory",
]


def as_tensor(array: Any, name: str) -> torch.Tensor:
    """Return a tensor over the memory of a cupy, numba, numpy or other array, by DLPack or its CUDA interface.

    Raises:
        TypeError: something that is no array, or a tensor without plain memory of its own.
        ValueError: an array that is not contiguous, or whose memory the GPU that it names does not reach.
    """
    refuse_traces()
    if isinstance(array, torch.Tensor):
        tensor = readable(array, name)
    elif hasattr(array, "__dlpack__"):
        tensor = torch.utils.dlpack.from_dlpack(array)
    elif hasattr(array, "__cuda_array_interface__"):
        tensor = _over_the_same_memory(array)
    else:
        raise TypeError(f"{name} must be a tensor or an array (DLPack), not {type(array).__name__}")
    if not isinstance(array, torch.Tensor) and tensor.numel() and core_stream(tensor.device) not in (None, HOST):
        _core.check_memory(GPU_BACKEND, tensor.data_ptr(), tensor.device.index, name)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tensor.stride()} for {tuple(tensor.shape)}")
    return tensor


def _over_the_same_memory(array: Any) -> torch.Tensor:
    """Torch takes such an array to the GPU that it is told, by a copy where the array is on another one."""
    pointer, gpus = array.__cuda_array_interface__["data"][0], range(torch.cuda.device_count())
    current = torch.cuda.current_device()
    for gpu in sorted(gpus, key=current.__ne__):  # the current one first
        tensor = torch.as_tensor(array, device=torch.device("cuda", gpu))
        if memory_of([tensor])[0] == [pointer] or not tensor.numel():
            return tensor
    raise TypeError(f"torch cannot access the GPU memory of this {type(array).__name__}")


def as_out(array: Any, name: str) -> torch.Tensor:
    """Return an output as a tensor, never a copy; see :func:`as_tensor`.

    Raises:
        ValueError: memory that must not be written, or not through this tensor.
    """
    if isinstance(array, torch.Tensor):
        check_writable([array], lambda _: name)
    elif _is_read_only(array):
        raise ValueError(f"{name} is a read-only array")
    return as_tensor(array, name)


def _is_read_only(array: Any) -> bool:
    """Return whether an array is read-only, as numpy and ``__cuda_array_interface__`` say it."""
    interface = getattr(array, "__cuda_array_interface__", None)
    return not getattr(getattr(array, "flags", None), "writeable", True) or bool(interface and interface["data"][1])


def as_tensors(arrays: Sequence[Any], name: str) -> list[torch.Tensor]:
    """:func:`as_tensor` of each; all of one dtype and device, at least one."""
    return with_memory(arrays, name)[0]


def with_memory(
    arrays: Sequence[Any], name: str, *, written: bool = False
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Return :func:`as_tensor` of each, or :func:`as_out`, their addresses, and their numbers of elements.

    They are of one dtype and device, at least one.
    """
    if isinstance(arrays, torch.Tensor) or not isinstance(arrays, Sequence):
        raise TypeError(f"{name} is a sequence of tensors, not {type(arrays).__name__}")
    refuse_traces()
    if not arrays:
        raise ValueError(f"{name} is empty: at least one tensor is wanted")
    memory = plain_memory(arrays) if isinstance(arrays[0], torch.Tensor) else None
    if memory and not (written and any(map(attrgetter("requires_grad"), arrays))):
        return list(arrays), *memory
    look = as_out if written else as_tensor
    tensors = [look(array, f"{name}[{position}]") for position, array in enumerate(arrays)]
    for position, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            raise ValueError(
                f"{name}[{position}] is {tensor.dtype} on {tensor.device}, and {name}[0] is {tensors[0].dtype} on "
                f"{tensors[0].device}: one dtype and one device are wanted"
            )
    return tensors, list(map(torch.Tensor.data_ptr, tensors)), list(map(torch.Tensor.numel, tensors))


def on_one_device(**tensors: torch.Tensor | None) -> torch.device:
    """Return the device of all of them.

    Raises:
        ValueError: names the first two that differ.
    """
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = given[0]
    for name, tensor in given:
        if tensor.device != first.device:
            raise ValueError(f"{first_name} and {name} must be on one device, not {first.device} and {tensor.device}")
    return first.device


def check_floating(what: str, *dtypes: torch.dtype) -> None:
    """Raise TypeError for a dtype that is not floating, or is one that no kernel knows."""
    for dtype in dtypes:
        if dtype not in FLOATING:
            raise TypeError(f"{what} works on {', '.join(FLOATING.values())}, not on {dtype}")


def check_like(tensor: torch.Tensor, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ValueError unless the tensor has this shape and dtype."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {tuple(shape)} {dtype}, not {tuple(tensor.shape)} {tensor.dtype}")


def check_outs(outs: Sequence[torch.Tensor], names: Sequence[str], read: Sequence[torch.Tensor] = ()) -> None:
    """Raise unless each may be written, and none overlaps another, or partly overlaps an input."""
    check_writable(outs, names.__getitem__)
    check_disjoint(outs, names.__getitem__, read)
