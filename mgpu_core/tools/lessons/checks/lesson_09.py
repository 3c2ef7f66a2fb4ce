"""Lesson 9, one device or many."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_core.tools.explain.predict import exposed_seconds
from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect

__all__ = ["exercise_1", "exercise_2", "exercise_3"]


_TEAMS: tuple[tuple[int, list[int]], ...] = (
    (100, [2, 2, 1]),
    (10, [1, 1, 1]),
    (7, [3]),
    (9, [1, 4]),
    (0, [1, 2]),
    (3, [1] * 8),
    (8, [5, 1, 1]),
    (2, [1, 3]),
)
_SPEEDS = (1, 2, 3, 5)


@asks_for("exposed")
def exercise_1(answer: Callable[[list[float], list[float], float], Any]) -> None:
    """Check: one bucket, many, a slow bus, all hidden, no bucket at all."""
    steps: list[tuple[list[float], list[float], float]] = [
        ([2.0, 4.0, 6.0], [1.0, 1.0, 1.0], 6.0),
        ([2.0, 4.0, 6.0], [3.0, 3.0, 3.0], 6.0),
        ([6.0], [3.0], 6.0),
        ([1.0], [2.0], 8.0),
        ([1.0, 1.0, 8.0], [2.0, 2.0, 0.0], 8.0),
        ([], [], 4.0),
        ([float(i) for i in range(8)], [2.0] * 8, 8.0),
    ]
    for ready, taken, backward in steps:
        wanted = exposed_seconds(ready, taken, backward)
        expect(f"exposed({ready}, {taken}, {backward})", answer(list(ready), list(taken), backward), wanted)


@asks_for("fair_counts")
def exercise_2(answer: Callable[[int, list[int]], Any]) -> None:
    """Check: on 1, 2, 3, 4 and 8 devices, against the best of all ways to share the rows; few enough to try all."""
    chance = random.Random(9)
    teams = [
        *_TEAMS,
        *((rows, [*speeds]) for rows in range(9) for n in (1, 2, 3) for speeds in itertools.product(_SPEEDS, repeat=n)),
        *((chance.randrange(9), [chance.randrange(1, 13) for _ in range(4)]) for _ in range(50)),
    ]
    for rows, speeds in teams:
        _check_shares(rows, speeds, answer(rows, list(speeds)))


def _check_shares(rows: int, speeds: list[int], counts: Any) -> None:
    call = f"fair_counts({rows}, {speeds})"
    whole = isinstance(counts, list | tuple) and all(type(count) is int and count >= 0 for count in counts)
    if not whole or len(counts) != len(speeds):
        raise WrongAnswer(f"{call}: expected {len(speeds)} whole numbers, got {counts!r}")
    if sum(counts) != rows:
        raise WrongAnswer(f"{call}: {sum(counts)} of {rows} rows are given away: {counts}")
    slowest, best = _slowest(counts, speeds), _best(rows, speeds)
    if slowest > best:
        raise WrongAnswer(f"{call}: the slowest of {counts} takes {slowest:g}, and {best:g} can be reached")


def _slowest(counts: Sequence[int], speeds: Sequence[int]) -> float:
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def _best(rows: int, speeds: Sequence[int]) -> float:
    """Return the least time in which so many rows can be done: one of the times at which some device ends a row."""
    times = sorted({count / speed for speed, count in itertools.product(speeds, range(rows + 1))})
    return next(time for time in times if sum(int(time * speed + 1e-9) for speed in speeds) >= rows)


@asks_for("efficiency")
def exercise_3(answer: Callable[[list[float], list[float], int], Any]) -> None:
    """Check: whole numbers, and one sample that is not to be believed."""
    expect("efficiency([8, 8, 8], [2, 2, 2], 4)", answer([8.0] * 3, [2.0] * 3, 4), 1.0)
    expect("efficiency([6, 6, 6], [4, 4, 4], 3)", answer([6.0] * 3, [4.0] * 3, 3), 0.5)
    expect("efficiency([4], [4], 1)", answer([4.0], [4.0], 1), 1.0)
    spoilt = [2.0, 200.0, 2.0, 2.0, 2.0]
    call = f"efficiency([8, 8, 8], {spoilt}, 4), with one sample that took a hundred times as long"
    expect(call, answer([8.0] * 3, spoilt, 4), 1.0)
    call = "efficiency([8, 800, 8], [2, 2, 2], 4), with one sample that took a hundred times as long"
    expect(call, answer([8.0, 800.0, 8.0], [2.0] * 3, 4), 1.0)
