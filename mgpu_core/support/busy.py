"""Other programs on this machine: they slow down whatever is measured here, and not everything alike."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["busy_note", "others_busy"]

LOOK_SECONDS, BUSY = 0.2, 0.5
"""How long to look, and how many processors others must use meanwhile to count as busy."""

_STAT = Path("/proc/stat")


def busy_note() -> str:
    """Return a note if other programs use our processors now; otherwise an empty text, also where it is not known.

    It sleeps while it looks, and so must the threads and processes of this program: they must not count as others.
    """
    others = others_busy()
    if others is None or others < BUSY:
        return ""
    return f"other programs keep {others:.1f} of {len(_cpus())} processors busy: repeat it on a quiet machine"


def others_busy(seconds: float = LOOK_SECONDS) -> float | None:
    """Return how many processors other programs keep busy on average; ``None`` where the system does not tell."""
    if not _STAT.exists():
        return None
    before, own_time, begin = _busy_seconds(), time.process_time(), time.perf_counter()
    time.sleep(seconds)
    used, own_time = _busy_seconds() - before, time.process_time() - own_time
    return max(0.0, used - own_time) / (time.perf_counter() - begin)


def _cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _busy_seconds() -> float:
    """Return the seconds that programs and their system calls have had on the processors that we may use."""
    names = {f"cpu{number}" for number in _cpus()}
    lines = [line.split() for line in _STAT.read_text().splitlines()]
    # user, nice, system; without interrupts, which may be of our own traffic
    ticks = sum(sum(map(int, numbers[:3])) for name, *numbers in filter(None, lines) if name in names)
    return ticks / os.sysconf("SC_CLK_TCK")
