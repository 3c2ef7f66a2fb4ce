"""Whether others use the processors that are about to be measured."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

__all__ = ["busy_note", "busy_notes"]

_BUSY = 0.5


def busy_notes(places: Sequence[torch.device]) -> list[str]:
    """A note if CPU ranks would share it: torch's threads wait for each other, so one device suffers most."""
    if all(place.type != "cpu" for place in places) or not hasattr(os, "getloadavg"):
        return []
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return busy_note(os.getloadavg()[0], cpus)


def busy_note(load: float, cpus: int) -> list[str]:
    """For the average number of threads that ran or wanted to run in the last minute."""
    if load <= _BUSY * cpus:
        return []
    return [f"the machine was busy before this began (load {load:.1f} on {cpus} CPUs): repeat it on a quiet one"]
