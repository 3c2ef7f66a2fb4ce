"""How long a rank works: by the host's clock on the CPU, by events on a GPU, where the host is done long before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["RankClock"]


class RankClock:
    """Times one rank's work in one step; started and stopped in its thread, on its current stream.

    Args:
        device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._seconds: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the work inside; of work that fails there is no time."""
        if self._events:
            self._events[0].record()
        begin = time.perf_counter()
        yield
        if self._events:
            self._events[1].record()
        self._seconds = time.perf_counter() - begin

    def seconds(self) -> float | None:
        """Return the seconds without waiting; ``None`` while a GPU is still at work, or if the work did not end."""
        if self._seconds is None or not self._events:
            return self._seconds
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events[1].query() else None
