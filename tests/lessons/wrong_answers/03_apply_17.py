# Exercise 3 is wrong: the shortest call, which one lucky call decides.
# The checker says: {'threads': [5, 1, 4, 4], 'caller': [5, 3, 3, 3]}, 3 samples: expected 'caller', got 'threads'

from collections.abc import Callable


def faster_way(seconds_of: Callable[[str], float], samples: int) -> str:
    seconds: dict[str, list[float]] = {"threads": [], "caller": []}
    for _ in range(samples + 1):
        for way, taken in seconds.items():
            taken.append(seconds_of(way))
    return min(seconds, key=lambda way: min(seconds[way][1:]))
