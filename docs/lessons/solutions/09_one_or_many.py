"""Lesson 9, one device or many: the solution."""

import statistics
from collections.abc import Sequence


def exposed(ready: Sequence[float], taken: Sequence[float], backward: float) -> float:
    """Bucket by bucket, as a queue with one server."""
    done = 0.0
    for complete, seconds in zip(ready, taken, strict=True):
        done = max(done, complete) + seconds
    return max(0.0, done - backward)


def fair_counts(rows: int, speeds: Sequence[int]) -> list[int]:
    """One row after the other, each to the device that would be done with it first."""
    counts = [0] * len(speeds)
    for _ in range(rows):
        first = min(
            range(len(speeds)), key=lambda rank: (counts[rank] + 1) / speeds[rank]
        )
        counts[first] += 1
    return counts


def efficiency(one: Sequence[float], many: Sequence[float], ranks: int) -> float:
    """The speed-up of medians, over the ranks."""
    return statistics.median(one) / statistics.median(many) / ranks
