"""Lesson 9, one device or many: write the three functions, then run `mgpu lesson check 9`.

Plain Python is all you need.
"""

from collections.abc import Sequence


def exposed(ready: Sequence[float], taken: Sequence[float], backward: float) -> float:
    """How long the last all-reduce ends after backward; 0 if it is done before.

    Bucket b is complete `ready[b]` seconds after the begin of backward, and its all-reduce takes `taken[b]`.  Buckets
    travel one after another, in the order of the lists; each begins when it is complete and the one before is done.
    """
    raise NotImplementedError


def fair_counts(rows: int, speeds: Sequence[int]) -> list[int]:
    """Rows for each device, so that the time of the slowest, `max(count / speed)`, is as small as it can be.

    `speeds` are rows a second, at least 1.  All rows are given away; a device may get none.  Where several answers are
    as good, any of them will do.
    """
    raise NotImplementedError


def efficiency(one: Sequence[float], many: Sequence[float], ranks: int) -> float:
    """How much of the ideal speed-up the ranks reach: 1.0 is all of it.

    `one` and `many` are the measured seconds of a step on one device and on all of them.  A sample that took a hundred
    times as long as the others (the machine did something else) must not change the answer.
    """
    raise NotImplementedError
