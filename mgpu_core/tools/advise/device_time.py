"""The time that a GPU needs for its work, told apart from the time that the host takes to ask for it.

Two events stand around the work on its stream. The stream is first put to sleep, so that the host has queued all of the
work before the GPU begins with it: between the events there is then nothing but the work. Whether that was so is asked
of the first event, and a run in which the host came too late is done again after a longer sleep.
"""

import time
from collections.abc import Callable

import torch

__all__ = ["LONGEST_SLEEP", "DeviceTime"]

CYCLES_PER_SECOND = 2e9
"""Of a GPU's clock, or somewhat more: too long a sleep does no harm."""
LONGEST_SLEEP = 0.5
"""Seconds. Who is late then queues more than the GPU's queue holds; its own waiting is its time."""
LONG_SLEEP = 0.016
"""Seconds."""
MANY_TIMES = 4
"""A host that is late even behind a long sleep, of so many times its own time, waits for the GPU: it varies by less."""


class DeviceTime:
    """Work behind a sleep; the sleep grows until the host is always ahead.

    Work that waits for the GPU in the middle (a table that it copies there) waits for the sleep too, and is never
    ahead: it is found out by that, and goes without a sleep from then on. Its own waiting is its time.

    Args:
        work: launches on the current stream of the current GPU.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._sleep = 1e-3
        self._waits = False

    def __call__(self) -> float:
        """Do the work; return the GPU's seconds for it."""
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
