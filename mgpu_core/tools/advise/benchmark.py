"""Time the strategies in turns, A B C A B C ..., so that a busy machine disturbs all alike.

A turn is so many steps that a clock can tell them apart, after one that brings the way's memory back into the caches.
A way that fails is out, with its reason, and the others go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mgpu_core.support.progress import Report, silent
from mgpu_core.tools.advise.batches import Batch
from mgpu_core.tools.advise.data import Measurement
from mgpu_core.tools.advise.strategies import Way, first_line

__all__ = ["LEAST", "Budget", "Stopwatch", "contest", "steps_a_turn", "stopwatch"]

LEAST = 3
"""Repeats that are made even when the time is up."""

_TURN_SECONDS, _MOST_STEPS = 0.02, 50

Stopwatch = Callable[[str, int, Callable[[], object], int], float]
"""Of a way, a batch of so many rows, its step and a count: does it so often, and returns the seconds of one."""


class Budget:
    """Seconds that are left.

    Args:
        seconds: in all, from now on.
        now: the time in seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._end = now() + seconds

    @property
    def left(self) -> float:
        """Seconds; negative when the time is up."""
        return self._end - self.now()

    def part(self, parts: int) -> Budget:
        """Return one of ``parts`` equal parts of the time that is left."""
        return Budget(self.left / parts, self.now)


def stopwatch(devices: tuple[torch.device, ...]) -> Stopwatch:
    """Return a stopwatch that waits for these devices before it reads the clock."""
    late = [each for each in devices if each.type != "cpu"]

    def run(_way: str, _rows: int, step: Callable[[], object], count: int) -> float:
        _wait(late)
        begin = time.perf_counter()
        for _ in range(count):
            step()
        _wait(late)
        return (time.perf_counter() - begin) / count

    return run


def _wait(devices: list[torch.device]) -> None:
    for device in devices:
        torch.accelerator.synchronize(device)


def steps_a_turn(seconds: float) -> int:
    """Return how many steps of so many seconds a turn has."""
    return min(_MOST_STEPS, max(1, math.ceil(_TURN_SECONDS / max(seconds, 1e-9))))


@dataclass(slots=True)
class _Entrant:
    """One way in the contest of one batch; ``error`` is not empty once it is out."""

    name: str
    rows: int
    clock: Stopwatch
    way: Way | None = None
    steps: int = 1
    error: str = ""

    def enter(self, make: Callable[[], Way], batch: Batch) -> None:
        """Made, warmed up and checked."""
        try:
            self.way = way = make()
            seconds = [self.clock(self.name, self.rows, lambda: way.step(batch), 1) for _ in range(way.warm_up)]
            way.check()
            self.steps = steps_a_turn(seconds[-1])
        except Exception as error:
            self.leave(first_line(error))

    def turn(self, batch: Batch) -> float | None:
        """Return the seconds of a step; ``None`` once the strategy has failed."""
        way = self.way
        if way is None:
            return None
        try:
            if self.steps > 1:
                way.step(batch)
            return self.clock(self.name, self.rows, lambda: way.step(batch), self.steps)
        except Exception as error:
            self.leave(first_line(error))
            return None

    def leave(self, error: str = "") -> None:
        """Out, and its memory is free for the others."""
        self.error = error
        way, self.way = self.way, None
        if way is not None:
            try:
                way.close()
            except Exception as failure:
                self.error = self.error or first_line(failure)


def contest(
    ways: Mapping[str, Callable[[], Way]],
    batch: Batch,
    repeats: int,
    budget: Budget,
    clock: Stopwatch,
    report: Report = silent,
) -> list[Measurement]:
    """Return the seconds of a step of each way, in the order of the rounds; as many rounds as the budget allows.

    The report counts the warm-up as a round.
    """
    rows = batch[0].size(0)
    entrants = [_Entrant(name, rows, clock) for name in ways]
    timings: dict[str, list[float]] = {name: [] for name in ways}
    try:
        report(0.0, f"{rows} rows, warm-up")
        for entrant in entrants:
            entrant.enter(ways[entrant.name], batch)
        for number in range(repeats):
            report((1 + number) / (1 + repeats), f"{rows} rows, round {number + 1} of {repeats}")
            if number >= LEAST and budget.left <= 0:
                break
            for entrant in entrants:
                seconds = entrant.turn(batch)
                if seconds is not None:
                    timings[entrant.name].append(seconds)
        errors = {each.name: each.error for each in entrants}
    finally:
        for entrant in entrants:
            entrant.leave(entrant.error)
    return [Measurement(name, rows, () if errors[name] else tuple(timings[name]), errors[name]) for name in ways]
