"""``torch.cuda`` over the fake accelerator: its devices, streams and events are the fake's.

What the package says to ``torch.cuda`` runs, where a GPU's own behaviour is not what a test is about.  A graph runs its
work while it is recorded, and a replay runs it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fakes.accelerator import device_module

capturing: list[torch.Stream] = []  # the streams whose work is being recorded


def fake_of(device: int | str | torch.device) -> torch.device:
    """The fake with the index of a GPU."""
    return torch.device("fake", device if isinstance(device, int) else torch.device(device).index)


def _device(device: int | str | torch.device) -> Any:
    return torch.accelerator.device_index(fake_of(device).index)


def _stream(device: int | torch.device, priority: int = 0) -> torch.Stream:
    return torch.Stream(fake_of(device), priority=priority)


def _event(enable_timing: bool = False) -> torch.Event:
    return torch.Event(torch.device("fake", torch.accelerator.current_device_index()), enable_timing=enable_timing)


def _is_capturing() -> bool:
    """Of the current stream of the current device, as CUDA's."""
    return torch.accelerator.current_stream() in capturing


class Graph:
    """What ``torch.cuda.CUDAGraph`` is to the package."""

    pool: object = None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        """Begin on the current stream, which is not a default one; torch allows one capture at a time."""
        self.stream = torch.accelerator.current_stream()
        assert capture_error_mode == "thread_local"
        if capturing or not self.stream.stream_id:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.pool = pool
        capturing.append(self.stream)

    def capture_end(self) -> None:
        """End it; what the host has waited for a device meanwhile has invalidated it."""
        capturing.remove(self.stream)

    def replay(self) -> None:
        """Does nothing: the tests look at how a graph is recorded."""


def answer_as_cuda(setattr_: Callable[[object, str, Any], None]) -> None:
    """Makes ``torch.cuda`` answer for the fake devices; ``setattr_`` is as monkeypatch's."""
    fakes = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": device_module.device_count,
        "current_device": device_module.current_device,
        "device": _device,
        "Stream": _stream,
        "stream": lambda stream: stream,
        "current_stream": lambda device: torch.accelerator.current_stream(fake_of(device)),
        "Event": _event,
        "is_current_stream_capturing": _is_capturing,
        "CUDAGraph": Graph,
        "graph_pool_handle": object,
    }
    for name, fake in fakes.items():
        setattr_(torch.cuda, name, fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        setattr_(torch._C, name, lambda device, pool: None)
