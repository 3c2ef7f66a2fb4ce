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
    numpy = sys.modules.get("numpy.random")
    get_state = getattr(numpy, "get_state", None)  # which it has not got yet while it is loaded
    pythons, numpys = random.getstate(), None if get_state is None else get_state()
    places = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
    kind = places[0].type if places else "cuda"
    try:
        with torch.random.fork_rng([place.index for place in places], device_type=kind):
            yield
    finally:
        random.setstate(pythons)
        if numpy is not None and numpys is not None:
            numpy.set_state(numpys)
