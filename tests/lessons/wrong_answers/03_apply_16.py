# Exercise 3 is wrong: a mean, which one slow call spoils.
# The checker says: {'threads': [5, 2, 200, 2], 'caller': [5, 3, 3, 3]}, 3 samples: expected 'threads', got 'caller'

from collections.abc import Callable
from statistics import mean


def faster_way(seconds_of: Callable[[str], float], samples: int) -> str:
    seconds: dict[str, list[float]] = {"threads": [], "caller": []}
    for _ in range(samples + 1):
        for way, taken in seconds.items():
            taken.append(seconds_of(way))
    return min(seconds, key=lambda way: mean(seconds[way][1:]))
