"""The time that the work itself takes on a device, told apart from the time that the host takes to ask for it.

On a GPU two events stand around the work on its stream. The stream is first put to sleep, so that the host has queued
all of the work before the GPU begins with it: between the events there is then nothing but the work. Whether that was
so is asked of the first event, and a run in which the host came too late is done again after a longer sleep.
On the CPU the host is the device, and a wall clock does.
"""

import time
from collections.abc import Callable

import torch

from mgpu_core.tools.bench.timing import CacheFlush, timed

CYCLES_PER_SECOND = 2e9
"""Of a GPU's clock, or somewhat more: too long a sleep does no harm."""
LONGEST_SLEEP = 0.5
"""Seconds. Who is late then queues more than the GPU's queue holds; its own waiting is its time."""
LONG_SLEEP = 0.016
"""Seconds."""
MANY_TIMES = 4
"""A host that is late even behind a long sleep, of so many times its own time, waits for the GPU: it varies by less."""


class DeviceClock:
    """Runs work on one device and says how long it took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = _L2Flush(device) if device.type == "cuda" else CacheFlush()

    def run_of(self, work: Callable[[], object], clock: str) -> Callable[[], float]:
        """Return the `run` of a contestant: `device`, the work alone, or `wall`, from the call to its end."""
        if clock == "device" and self._device.type == "cuda":
            return _Queued(work)
        synchronize = torch.cuda.synchronize if self._device.type == "cuda" else lambda: None
        return timed(work, synchronize)

    def flush(self) -> None:
        """Put other bytes into the last cache before memory."""
        self._flush()


class _Queued:
    """Work behind a sleep; the sleep grows until the host is always ahead.

    Work that waits for the GPU in the middle (a table that it copies there) waits for the sleep too, and is never
    ahead: it is found out by that, and goes without a sleep from then on. Its own waiting is its time.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._sleep = 1e-3
        self._waits = False

    def __call__(self) -> float:
        first = 0.0
        while True:
            seconds, ahead, asked = self._once()
            if ahead or self._waits or self._sleep >= LONGEST_SLEEP:
                return seconds
            first = first or asked
            if asked >= self._sleep >= max(LONG_SLEEP, MANY_TIMES * first):
                self._waits = True
            else:
                self._sleep = min(2 * self._sleep, LONGEST_SLEEP)

    def _once(self) -> tuple[float, bool, float]:
        """Return the seconds of the work, whether the host was ahead, and its seconds for asking for the work."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not self._waits:
            torch.cuda._sleep(int(self._sleep * CYCLES_PER_SECOND))
        begin.record()
        start = time.perf_counter()
        self._work()
        asked = time.perf_counter() - start
        end.record()
        ahead = not begin.query()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, ahead, asked


class _L2Flush:
    """Reads four times the cache. Reading, because written bytes would still be on their way to memory in the run."""

    def __init__(self, device: torch.device) -> None:
        nbytes = 4 * torch.cuda.get_device_properties(device).L2_cache_size
        self._bytes = torch.ones(nbytes // 4, dtype=torch.float32, device=device)

    def __call__(self) -> None:
        self._bytes.sum()
        torch.cuda.synchronize(self._bytes.device)
