"""Copies of parameters for stages that are not their home, which calls without gradients share."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from mgpu_core.devices.transfer import copy_aside, hand_over, used_here

__all__ = ["ParameterCopies"]

_memory_of = torch.Tensor.data_ptr  # to compare, not to read


class _StageCopy(NamedTuple):
    source: weakref.ref[torch.Tensor]
    state: tuple[Any, ...]  # of the source, when it was copied
    tensor: torch.Tensor
    copied: torch.Event | None  # after the copy; ``None`` on the CPU


class ParameterCopies:
    """The copies that the calls of a placed module share, from whatever thread.

    A copy is made again after its parameter was written, or got other memory.  A write through ``.data`` is noticed
    once a call with gradients was made, because it lets go of the copy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[tuple[int, torch.device], _StageCopy] = {}

    def on(self, parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a parameter on a device, without its graph, for the current stream there."""
        if parameter.device == device or parameter.is_meta:
            return parameter
        if type(parameter) is not Parameter or parameter.is_inference():  # nothing tells whether they were written
            return _made(parameter, device)
        key, state = (id(parameter), device), (parameter._version, _memory_of(parameter), parameter.dtype)
        with self._lock:
            known = self._copies.get(key)
            if known is None or known.source() is not parameter or known.state != state:
                copy = _made(parameter, device)
                event = None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
                self._copies[key] = _StageCopy(weakref.ref(parameter), state, copy, event)
                return copy
        if known.copied is not None:
            torch.accelerator.current_stream(device).wait_event(known.copied)
            used_here([known.tensor])
        return known.tensor

    def drop(self, parameter: torch.Tensor) -> None:
        """Let go of the copies of a parameter that is trained."""
        with self._lock:
            for key in [key for key in self._copies if key[0] == id(parameter)]:
                del self._copies[key]

    def clear(self) -> None:
        """Let go of all copies."""
        with self._lock:
            self._copies.clear()


def _made(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # calls of any mode compute with it
        copy = copy_aside(parameter.detach(), device)
        hand_over([copy])
    return copy
