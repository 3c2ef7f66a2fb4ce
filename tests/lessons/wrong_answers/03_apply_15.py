# Exercise 3 is wrong: the first call of each way counts, which starts threads and allocates memory.
# The checker says: expected 'threads', got 'caller'

from collections.abc import Callable
from statistics import median


def faster_way(seconds_of: Callable[[str], float], samples: int) -> str:
    seconds: dict[str, list[float]] = {"threads": [], "caller": []}
    for _ in range(samples + 1):
        for way, taken in seconds.items():
            taken.append(seconds_of(way))
    return min(seconds, key=lambda way: median(seconds[way]))
