"""Who waits for whom: the one file that knows what a stream is.

On the CPU there is nothing to wait for.  On an accelerator the work of a rank is put on the stream that the caller had
current on the rank's device, so that what the caller does before and after the call is ordered with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["caller_streams", "on"]


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
