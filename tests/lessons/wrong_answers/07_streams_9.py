# Exercise 1 is wrong: each stream has its work, but that of stream 0 does it all.
# The checker says: what ran, and on which stream: [('copy', 0), ('compute', 0)]
from collections.abc import Callable
from typing import Any


def copy_then_compute(device: Any, copy: Callable[[], None], compute: Callable[[], None]) -> None:
    device.put(0, lambda: (copy(), compute()))
    device.put(1, lambda: None)
