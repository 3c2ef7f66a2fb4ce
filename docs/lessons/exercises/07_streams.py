"""Lesson 7, streams: write the three functions, then run `mgpu lesson check 7`.

`device.put(stream, work)` puts a function on a stream.  `device.record(stream)` returns an event behind all that is on
the stream now.  `device.wait(stream, event)` lets what is put on the stream from now on run after the event.  Nothing
runs before you return; you cannot wait for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any


def copy_then_compute(
    device: Any, copy: Callable[[], None], compute: Callable[[], None]
) -> None:
    """Puts `copy` on stream 0 and `compute` on stream 1; `compute` runs after `copy`."""
    raise NotImplementedError


def barrier(device: Any, streams: Sequence[int]) -> None:
    """What is put on any of the streams later, runs after all that is on any of them now."""
    raise NotImplementedError


def double_buffer(
    device: Any,
    load: Callable[[int, int], Callable[[], None]],
    use: Callable[[int], Callable[[], None]],
    count: int,
) -> None:
    """Loads and uses `count` batches: batch b goes through buffer b % 2.

    `load(batch, buffer)` is the work of a load, and goes on stream 0; `use(buffer)` is the work that reads a buffer,
    and goes on stream 1.  Uses are in the order of the batches, each of its own batch.  The load of a batch may run
    while the one before is used: so it waits for nothing but the last use of its own buffer.
    """
    raise NotImplementedError
