"""When work on a GPU began and ended: by events, whose times are put on the host's axis."""

from __future__ import annotations

import threading
import time
from typing import TypeAlias

import torch

from mgpu_core.devices.streams import is_capturing
from mgpu_core.devices.time_limits import time_limit
from mgpu_core.errors import Error
from mgpu_core.trace.buffer import Clock

__all__ = ["EventClock"]

_Moment: TypeAlias = tuple[int, torch.cuda.Event]  # GPU, and what was recorded there


class EventClock(Clock):
    """Of all GPUs; other devices have the host's time.

    A GPU's axis begins at its first mark: one event is recorded at a known host time, when the GPU is idle.  The others
    are so many milliseconds after it.  A GPU without a mark gets no event, which would make a context there.
    """

    def __init__(self) -> None:
        self._begins: dict[int, tuple[torch.cuda.Event, int]] = {}
        self._lock = threading.Lock()

    def mark(self, device: torch.device) -> object:
        """Return a moment in the current stream of the device; ``None`` on the host, and inside a graph's capture."""
        if device.type != "cuda":
            return None
        gpu = torch.cuda.current_device() if device.index is None else device.index
        if is_capturing(gpu):
            return None
        self._begin(gpu)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(gpu))
        return gpu, event

    def ns(self, mark: _Moment) -> int:
        """When it was, in ns of ``time.perf_counter_ns``.

        Raises:
            Error: the GPU has not come so far within ``MGPU_CORE_TIMEOUT`` seconds.
        """
        gpu, event = mark
        first, host_ns = self._begins[gpu]
        _wait_for(event, gpu)
        milliseconds: float = first.elapsed_time(event)
        return host_ns + round(milliseconds * 1e6)

    def _begin(self, gpu: int) -> None:
        with self._lock:
            if gpu in self._begins:
                return
            stream = torch.cuda.current_stream(gpu)
            event = torch.cuda.Event(enable_timing=True)
            stream.synchronize()
            host_ns = time.perf_counter_ns()  # before the event, so that no mark seems later than it was
            event.record(stream)
            _wait_for(event, gpu)
            self._begins[gpu] = event, host_ns


def _wait_for(event: torch.cuda.Event, gpu: int) -> None:
    seconds = time_limit()
    until = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > until:
            raise Error(f"cuda:{gpu} was still at work {seconds:g} s after the recording: its times are not known")
        time.sleep(1e-5)
