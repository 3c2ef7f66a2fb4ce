"""Choose how the ranks of a team run: each in a thread of its own, or one after the other in the caller's thread.

Threads are faster where operations are long.  Where operations take some microseconds, threads wait for the GIL most of
the time, and one thread that launches all of them is faster.  Which it is depends on the module and the size of the
batch.  On accelerators, where both ways give the same bits, ``auto`` measures: the first calls of each size run in
turn in both ways, and the faster way is kept; without the GIL threads are taken.  On the CPU a rank in a thread has a
part of the cores, and so other sums: there ``auto`` is ``caller``, and one seed has one result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Sequence
from statistics import median

import torch

from mgpu_core.devices import streams

__all__ = ["WORKERS", "WorkerChoice", "check_workers", "size_of"]

WORKERS = ("threads", "caller", "auto")
WARM_UP = 1  # calls of each way that say little: threads are started, kernels chosen
SAMPLES = 3  # calls of each way that are timed
KEPT = 256  # sizes of batches that are remembered


def check_workers(workers: str) -> None:
    """Raise ValueError for anything but ``threads``, ``caller`` and ``auto``."""
    if workers not in WORKERS:
        raise ValueError(f"workers must be one of {', '.join(WORKERS)}, not {workers!r}")


class WorkerChoice:
    """How the ranks of one module run, by the size of the batch.

    Args:
        asked: ``threads``, ``caller`` or ``auto``.
        devices: one per rank.
        rng: ``per_rank`` asks for the same numbers in every run: then ``auto`` is ``threads`` on accelerators.

    Attributes:
        now: the answer to the last call.
        is_open: it depends on the call; else ``now`` stays as it is.
    """

    def __init__(self, asked: str, devices: Sequence[torch.device], rng: str) -> None:
        self._accelerators = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
        has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
        on_accelerators = len(self._accelerators) == len(set(devices))
        self.is_open = asked == "auto" and len(devices) > 1 and rng != "per_rank" and has_gil and on_accelerators
        self._usual = asked if asked != "auto" else "threads" if on_accelerators else "caller"
        self._chosen: dict[Hashable, str] = {}
        self._times: dict[Hashable, dict[str, list[float]]] = {}
        self._begin = 0.0
        self.now = self._usual

    def begin(self, size: Hashable, *, meets: bool = False) -> bool:
        """Set ``now`` for a call; return whether the call is timed: it ends in :meth:`end`.

        Args:
            size: of the batch.
            meets: the ranks wait for each other in the forward, which only threads can.
        """
        if not self.is_open or meets:
            self.now = "threads" if meets else self._usual
            return False
        if (way := self._chosen.get(size)) is not None:
            self.now = way
            return False
        if torch.are_deterministic_algorithms_enabled() or self._is_recorded():
            self.now = "threads"
            return False
        times = self._times.setdefault(size, {"threads": [], "caller": []})
        self.now = min(times, key=lambda way: len(times[way]))
        self._synchronize()
        self._begin = time.perf_counter()
        return True

    def end(self, size: Hashable) -> None:
        """Take the time of a call that went through; after some of them the faster way is kept."""
        self._synchronize()
        times = self._times.get(size)
        if times is None:  # another thread of the caller's has ended the measurement meanwhile
            return
        times[self.now].append(time.perf_counter() - self._begin)
        if all(len(taken) >= WARM_UP + SAMPLES for taken in times.values()):
            if len(self._chosen) >= KEPT:
                self._chosen.clear()
            self._chosen[size] = min(times, key=lambda way: median(times[way][WARM_UP:]))
            self._times.pop(size, None)

    def _is_recorded(self) -> bool:
        """Return whether a caller's CUDA graph records this call: its host may not wait, and its time says nothing."""
        return any(
            device.type == streams.GPU_TYPE and streams.is_capturing(device.index) for device in self._accelerators
        )

    def _synchronize(self) -> None:
        # Not for whole devices: that would invalidate what another thread records.
        for device in self._accelerators:
            torch.accelerator.current_stream(device).synchronize()

    def chosen(self) -> list[list[object]]:
        """Return the choices, for a state: pairs of a size and a way."""
        return [[list(size) if isinstance(size, tuple) else size, way] for size, way in self._chosen.items()]

    def resume(self, chosen: Sequence[Sequence[object]]) -> None:
        """Adopt the choices of a state, unless the way to run is fixed."""
        if self.is_open:
            self._times.clear()
            self._chosen = {tuple(size) if isinstance(size, list) else size: str(way) for size, way in chosen}


def size_of(inputs: Sequence[object]) -> Hashable:
    """Return the shape of the first input; one that is no tensor has none."""
    first = inputs[0] if inputs else None
    return tuple(first.shape) if isinstance(first, torch.Tensor) else None
