# Exercise 3 is wrong: a load does not wait for the last use of its buffer.
# The checker says: a use read batch
from collections.abc import Callable
from typing import Any


def double_buffer(
    device: Any, load: Callable[[int, int], Callable[[], None]], use: Callable[[int], Callable[[], None]], count: int
) -> None:
    for batch in range(count):
        device.put(0, load(batch, batch % 2))
        device.wait(1, device.record(0))
        device.put(1, use(batch % 2))
