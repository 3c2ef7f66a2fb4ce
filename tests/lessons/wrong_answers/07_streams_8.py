# Exercise 3 is wrong: a stream for each buffer, with its loads and uses; so there is nothing to wait for.
# The checker says: double_buffer of 5 batches: the streams that its work ran on: ['load']: expected [0, 0, 0, 0, 0]
from collections.abc import Callable
from typing import Any


def double_buffer(
    device: Any, load: Callable[[int, int], Callable[[], None]], use: Callable[[int], Callable[[], None]], count: int
) -> None:
    for batch in range(count):
        buffer = batch % 2
        device.put(buffer, load(batch, buffer))
        device.put(buffer, use(buffer))
