"""What measuring must leave as it was: the random numbers that come next."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["random_state_kept"]


@contextmanager
def random_state_kept(devices: Sequence[torch.device]) -> Iterator[None]:
    """Puts the states of torch's generators, Python's and numpy's (if it is loaded) back at the end."""
    loaded = sys.modules.get("numpy.random")
    numpy = loaded if hasattr(loaded, "set_state") else None  # which it has not got yet while it is being loaded
    pythons, numpys = random.getstate(), None if numpy is None else numpy.get_state()
    places = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
    kind = places[0].type if places else "cuda"
    try:
        with torch.random.fork_rng([place.index for place in places], device_type=kind):
            yield
    finally:
        random.setstate(pythons)
        if numpy is not None:
            numpy.set_state(numpys)
