"""Guards around the measurements: notes on busy processors, and random generators restored afterwards."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mgpu_core.ranks.random import random_numbers_kept

__all__ = ["busy_note", "busy_notes", "random_state_kept"]

_BUSY = 0.5


def busy_notes(devices_: Sequence[torch.device]) -> list[str]:
    """Return a note if CPU ranks would share it: torch's threads wait for each other, so one device suffers most."""
    if all(each.type != "cpu" for each in devices_) or not hasattr(os, "getloadavg"):
        return []
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return busy_note(os.getloadavg()[0], cpus)


def busy_note(load: float, cpus: int) -> list[str]:
    """Return a note if the average number of running threads of the last minute says that cores are busy."""
    if load <= _BUSY * cpus:
        return []
    return [f"the machine was busy before this began (load {load:.1f} on {cpus} CPUs): repeat it on a quiet one"]


@contextmanager
def random_state_kept(devices: Sequence[torch.device]) -> Iterator[None]:
    """Put the states of torch's generators, Python's and numpy's (if it is loaded) back at the end."""
    loaded = sys.modules.get("numpy.random")
    numpy = loaded if hasattr(loaded, "set_state") else None  # which it has not got yet while it is being loaded
    pythons, numpys = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        with random_numbers_kept(devices):
            yield
    finally:
        random.setstate(pythons)
        if numpy is not None:
            numpy.set_state(numpys)
