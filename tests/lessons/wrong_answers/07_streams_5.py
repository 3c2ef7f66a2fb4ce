# Exercise 3 is wrong: a load waits for the use just before, so nothing ever overlaps.
# The checker says: never ran ahead of the use of the batch before
from collections.abc import Callable
from typing import Any


def double_buffer(
    device: Any, load: Callable[[int, int], Callable[[], None]], use: Callable[[int], Callable[[], None]], count: int
) -> None:
    for batch in range(count):
        device.wait(0, device.record(1))
        device.put(0, load(batch, batch % 2))
        device.wait(1, device.record(0))
        device.put(1, use(batch % 2))
