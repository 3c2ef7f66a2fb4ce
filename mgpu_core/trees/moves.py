"""Modules whose parts are on several devices: how they are told, and how a tensor gets other memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from mgpu_core.devices.transfer import to_device

__all__ = ["give_memory", "is_spread", "move_buffers", "refuse_moves"]


def is_spread(module: Module) -> bool:
    """Return whether the parts of a module were put on several devices, by ``place`` or ``Pipeline``."""
    return getattr(module.to, "__func__", module.to) is refuse_moves


def refuse_moves(*args: Any, **kwargs: Any) -> Any:
    """Stand in for ``to``, ``cuda`` and ``cpu`` of a module whose parts are on several devices.

    Raises:
        RuntimeError: it would bring all parts to one device.
    """
    raise RuntimeError(
        "this module's parts are on several devices: to(), cuda() and cpu() would bring them all to one. Change dtypes "
        "with half(), float(), bfloat16() or double(); for another placement, make it anew from the module"
    )


def give_memory(parameter: torch.Tensor, moved: torch.Tensor) -> None:
    """Let a parameter or buffer have the memory of a tensor, and stay the same object."""
    try:
        parameter.data = moved
    except RuntimeError:  # of another kind of device: torch exchanges all of the two tensors, attributes too
        other = torch.Tensor._make_subclass(type(parameter), moved, parameter.requires_grad)
        other.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, other)


def move_buffers(module: Module, device: torch.device) -> None:
    """Move the buffers of a module to a device, and leave its parameters where they are."""
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"buffer {name} has no memory: make the module inside mgpu_core.parameters_on_meta()")
        if buffer.device != device:
            give_memory(buffer, to_device(buffer.detach(), device))
