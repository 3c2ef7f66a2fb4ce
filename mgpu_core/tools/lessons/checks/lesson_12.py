"""Lesson 12, pipelines."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect, shown

__all__ = ["exercise_1", "exercise_2", "exercise_3"]


@asks_for("gpipe")
def exercise_1(answer: Callable[[int, int], Any]) -> None:
    """Check: 1, 2, 3 and 8 stages, fewer micro-batches than stages and more."""
    for stages in (1, 2, 3, 8):
        for chunks in (1, 2, 5, 16):
            forwards = [(stage + batch, stage, "F", batch) for stage in range(stages) for batch in range(chunks)]
            end = 2 * (stages + chunks - 1) - 1
            backwards = [(end - slot, stage, "B", batch) for slot, stage, _, batch in forwards]
            expect(f"gpipe({stages}, {chunks})", answer(stages, chunks), sorted(forwards + backwards))


@asks_for("most_kept")
def exercise_2(answer: Callable[[list[tuple[int, int, str, int]], int], Any]) -> None:
    """Check: one after the other, all at once, in any order; other stages, and one that never goes back."""
    one_by_one = [(0, 0, "F", 0), (1, 0, "B", 0), (2, 0, "F", 1), (3, 0, "B", 1)]
    at_once = [(0, 0, "F", 0), (1, 0, "F", 1), (1, 1, "F", 0), (2, 1, "B", 0), (3, 0, "B", 0), (4, 0, "B", 1)]
    for actions, stage, wanted in (
        ([], 0, 0),
        (one_by_one, 0, 1),
        (one_by_one, 1, 0),
        (at_once, 0, 2),
        (at_once, 1, 1),
        (one_by_one[::-1], 0, 1),
        ([at_once[i] for i in (5, 0, 4, 1, 3, 2)], 0, 2),
        ([*one_by_one, (4, 0, "F", 2), (5, 0, "F", 3)], 0, 2),
    ):
        expect(f"most_kept({actions}, {stage})", answer(list(actions), stage), wanted)


@asks_for("best_cut")
def exercise_3(answer: Callable[[list[int], int], Any]) -> None:
    """Check: by hand, at random, and 60 layers in 8 parts, which are too many to try all."""
    chance = random.Random(12)
    cases: list[tuple[list[int], int]] = [([5], 1), ([4, 1, 1, 1, 1, 4], 3), ([1, 1, 1, 9], 2), ([9, 1, 1, 1], 2)]
    cases += [([chance.randint(1, 20) for _ in range(6)], parts) for parts in (1, 2, 3, 6)]
    cases.append(([chance.randint(1, 20) for _ in range(60)], 8))
    for costs, parts in cases:
        call = f"best_cut({costs}, {parts})"
        begins = answer(list(costs), parts)
        if not isinstance(begins, list) or len(begins) != parts - 1:
            raise WrongAnswer(f"{call}: expected a list of {parts - 1} begins, got {shown(begins)}")
        borders = [0, *begins, len(costs)]
        if any(not isinstance(each, int) for each in begins) or borders != sorted(set(borders)):
            raise WrongAnswer(f"{call}: expected begins of parts that are not empty, got {shown(begins)}")
        most = max(sum(costs[i:j]) for i, j in pairwise(borders))
        expect(f"{call}: {shown(begins)}, whose most expensive part costs", most, _least(costs, parts))


def _least(costs: list[int], parts: int) -> int:
    """Return the least cost of the most expensive part: the smallest limit under which few enough parts suffice."""
    limit = max(costs)
    while _parts_under(limit, costs) > parts:
        limit += 1
    return limit


def _parts_under(limit: int, costs: list[int]) -> int:
    """Return how many parts there are if each takes all layers that fit."""
    parts, filled = 1, 0
    for cost in costs:
        if filled + cost > limit:
            parts, filled = parts + 1, 0
        filled += cost
    return parts
