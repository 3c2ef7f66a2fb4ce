# Exercise 3 is wrong: all runs on stream 0, in order, and the work of stream 1 does nothing.
# The checker says: the streams that its work ran on: ['use']: expected [1, 1, 1, 1, 1], got [0, 0, 0, 0, 0]
from collections.abc import Callable
from typing import Any


def double_buffer(
    device: Any, load: Callable[[int, int], Callable[[], None]], use: Callable[[int], Callable[[], None]], count: int
) -> None:
    for batch in range(count):
        device.put(0, load(batch, batch % 2))
        device.put(1, lambda: None)
        if batch:
            device.put(0, use((batch - 1) % 2))
    device.put(0, use((count - 1) % 2))
