# Exercise 3 is wrong: no overlap: everything is sent after the last gradient.
# The checker says: finish(ready=[100, 200], nbytes=[1000, 1000], latency=10, rate=100): expected 220, got 240

from collections.abc import Sequence


def finish(ready: Sequence[int], nbytes: Sequence[int], latency: int, rate: int) -> int:
    return max(ready, default=0) + sum(latency + each // rate for each in nbytes)
