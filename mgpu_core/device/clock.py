"""How long a rank works: by the host's clock on the CPU, by events on a GPU, where the host is done long before."""

from __future__ import annotations

import time

import torch

__all__ = ["RankClock"]


class RankClock:
    """Of one rank's work in one step; started and stopped in its thread, on its current stream.

    Args:
        device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begin = self._end = 0.0
        self._is_stopped = False
        if self._on_gpu:
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        """Before the work."""
        if self._on_gpu:
            self._events[0].record()
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """Behind the work."""
        if self._on_gpu:
            self._events[1].record()
        self._end = time.perf_counter()
        self._is_stopped = True

    def seconds(self) -> float | None:
        """Nobody waits: ``None`` while a GPU is still at it, and where the work did not come to its end."""
        if not self._is_stopped:
            return None
        if not self._on_gpu:
            return self._end - self._begin
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events[1].query() else None
