"""Who waits for whom: the one file that knows what a stream is.

On the CPU there is nothing to wait for.  On an accelerator the work of a rank is put on the stream that the caller had
current on the rank's device, so that what the caller does before and after the call is ordered with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from mgpu_core import _core

__all__ = ["HOST", "caller_streams", "core_stream", "core_streams", "on"]

HOST = (-1, 0)  # the core's stream of host memory


def caller_streams(devices: Sequence[torch.device]) -> list[torch.Stream | None]:
    """The current stream of each device in the calling thread; ``None`` for the CPU."""
    return [None if device.type == "cpu" else torch.accelerator.current_stream(device) for device in devices]


@contextmanager
def on(device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
    """Makes ``device`` and ``stream`` the current ones of this thread."""
    if device.type == "cpu" or stream is None:
        yield
        return
    with torch.accelerator.device_index(device.index), stream:
        yield


def core_stream(device: torch.device) -> tuple[int, int] | None:
    """The current stream of a device as the core knows it; ``None`` for a device that the core has no room for."""
    if device.type == "cpu":
        return HOST
    if device.type == "cuda" and _cuda_room_works():
        return device.index, torch.cuda.current_stream(device).cuda_stream
    return None


def core_streams(devices: Sequence[torch.device]) -> list[tuple[int, int]] | None:
    """One stream per rank; ``None`` unless one room of the core serves all of these devices."""
    if all(device.type == "cpu" for device in devices):
        return [HOST] * len(devices)
    if any(device.type != "cuda" for device in devices) or not _cuda_room_works():
        return None
    return [(device.index, torch.cuda.current_stream(device).cuda_stream) for device in devices]


@cache
def _cuda_room_works() -> bool:
    """Whether the core sees the GPUs that torch sees; if not, torch's own copies and adds serve them."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    ours, theirs = _core.cuda_device_count(), torch.cuda.device_count()
    built = any(name == "cuda" and there for name, there, _ in _core.rooms())
    if built and ours != theirs:
        warnings.warn(
            f"torch sees {theirs} GPUs and mgpu_core's CUDA runtime {ours}: they are served by torch's copies and adds."
            " Build mgpu_core with the CUDA toolkit that fits the driver (MGPU_CUDA=system); see `mgpu doctor`.",
            RuntimeWarning,
            stacklevel=2,
        )
    return built and ours == theirs
