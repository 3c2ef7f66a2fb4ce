"""Lesson 3, apply: write the three functions, then run `mgpu lesson check 3`.

Use torch, threading and contextvars.
"""

from collections.abc import Callable, Sequence
from typing import Any


def apply_all(
    functions: Sequence[Callable[[Any], Any]], inputs: Sequence[Any]
) -> list[Any]:
    """Calls functions[rank](inputs[rank]) for all ranks at once, and returns the results in rank order.

    If some fail, all others have ended before this function raises; it raises the exception of the lowest rank that
    failed, the object itself.
    """
    raise NotImplementedError


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes the same arguments and does the same in any thread, as if it were called here and now.

    It takes along what is set in this thread when `carry` is called: whether gradients are recorded, whether autocast
    is on for the CPU and with which dtype, and all context variables.  It may be called more than once, but not by two
    threads at the same time.
    """
    raise NotImplementedError


def faster_way(seconds_of: Callable[[str], float], samples: int) -> str:
    """The faster way to run the ranks, "threads" or "caller"; "threads" if none is faster.

    seconds_of(way) runs all ranks once in this way and returns its seconds. Call it in turns, "threads" first, until
    each way has been run samples + 1 times. The first call of each way is a warm-up and does not count; compare the
    medians of the others.
    """
    raise NotImplementedError
