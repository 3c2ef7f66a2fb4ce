# Exercise 3 is wrong: every message is alone in the world; the wire is never busy.
# The checker says: finish(ready=[100, 105], nbytes=[1000, 1000], latency=10, rate=100): expected 140, got 125

from collections.abc import Sequence


def finish(ready: Sequence[int], nbytes: Sequence[int], latency: int, rate: int) -> int:
    return max((at + latency + each // rate for at, each in zip(ready, nbytes, strict=True)), default=0)
