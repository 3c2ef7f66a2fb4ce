"""Lesson 7, streams: the solution."""

from collections.abc import Callable, Sequence
from typing import Any


def copy_then_compute(
    device: Any, copy: Callable[[], None], compute: Callable[[], None]
) -> None:
    """The event is recorded behind the copy, and waited for before the computing is put."""
    device.put(0, copy)
    device.wait(1, device.record(0))
    device.put(1, compute)


def barrier(device: Any, streams: Sequence[int]) -> None:
    """All events first, then all waits: an event behind a wait would cover too much."""
    events = [device.record(stream) for stream in streams]
    for stream in streams:
        for event in events:
            device.wait(stream, event)


def double_buffer(
    device: Any,
    load: Callable[[int, int], Callable[[], None]],
    use: Callable[[int], Callable[[], None]],
    count: int,
) -> None:
    """Each load waits for the use of two batches before, each use for its load."""
    used: list[Any] = []
    for batch in range(count):
        buffer = batch % 2
        if batch >= 2:
            device.wait(0, used[batch - 2])
        device.put(0, load(batch, buffer))
        device.wait(1, device.record(0))
        device.put(1, use(buffer))
        used.append(device.record(1))
