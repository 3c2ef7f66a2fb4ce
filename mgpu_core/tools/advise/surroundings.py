"""Guards around the measurements: notes on busy processors, and random generators restored afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mgpu_core.ranks.random import random_numbers_kept
from mgpu_core.support.busy import busy_note

__all__ = ["busy_notes", "random_state_kept"]


def busy_notes(devices: Sequence[torch.device]) -> list[str]:
    """Return a note if CPU ranks share it: torch's threads wait for each other, so one device suffers most."""
    note = busy_note() if any(each.type == "cpu" for each in devices) else ""
    return [note] if note else []


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
