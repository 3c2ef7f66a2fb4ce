"""Schedules of a pipeline as plans: which stage works on which micro-batch, and when.

Pure functions of two numbers and a name.  A plan counts in slots of one action each, as the literature does: forward
and backward of a stage take one slot.  Sources: GPipe, arXiv:1811.06965; 1F1B, arXiv:1806.03377 and arXiv:2006.09503;
several stages per device, arXiv:2104.04473.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = ["BACKWARD", "FORWARD", "SCHEDULES", "Action", "bubble", "check_schedule", "plan"]

FORWARD, BACKWARD = "forward", "backward"
SCHEDULES = ("1f1b", "gpipe")


class Action(NamedTuple):
    """One stage works on one micro-batch.

    Attributes:
        time: the slot in which it runs; slots are numbered from 0.
        stage, micro_batch: indices.
        kind: ``forward`` or ``backward``.
    """

    time: int
    stage: int
    kind: str
    micro_batch: int


def check_schedule(schedule: str) -> None:
    """Raise ValueError for a schedule that does not exist."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")


def plan(
    stages: int, micro_batches: int, schedule: str = "1f1b", workers: Sequence[int] | None = None
) -> Sequence[Action]:
    """Return the actions of one step, each once, in an order in which one thread could run them.

    Args:
        stages, micro_batches: how many there are.
        schedule: ``gpipe``: all forwards, then all backwards; ``1f1b``: stage ``s`` runs a backward as soon as it can,
            and holds at most ``stages - s`` micro-batches between their forward and their backward.
        workers: per stage the worker that runs it, one action at a time; ``None``: each stage has its own.

    Raises:
        ValueError: another schedule, or fewer than one stage or micro-batch.
    """
    check_schedule(schedule)
    if min(stages, micro_batches) < 1:
        raise ValueError(f"a plan needs one stage and one micro-batch at least, not {stages} and {micro_batches}")
    return _planned(stages, micro_batches, schedule, tuple(range(stages) if workers is None else workers))


@lru_cache(maxsize=64)  # every call of a pipeline asks for its plan
def _planned(stages: int, micro_batches: int, schedule: str, workers: tuple[int, ...]) -> Sequence[Action]:
    groups = [[stage for stage in range(stages) if workers[stage] == each] for each in dict.fromkeys(workers)]
    forwards, backwards = [0] * stages, [0] * stages  # that each stage has run before the present slot

    def is_backward_ready(stage: int) -> bool:
        if schedule == "gpipe" and forwards[stage] < micro_batches:
            return False
        return backwards[stage] < (forwards[stage] if stage == stages - 1 else backwards[stage + 1])

    def is_forward_ready(stage: int) -> bool:
        limit = micro_batches if schedule == "gpipe" else stages - stage
        is_given = forwards[stage] < (micro_batches if stage == 0 else forwards[stage - 1])
        return is_given and forwards[stage] - backwards[stage] < limit

    def next_action(group: Sequence[int], time: int) -> Action | None:
        """Return the action of one worker in this slot: a backward if one is ready, otherwise a forward, or none."""
        if ready := [stage for stage in group if is_backward_ready(stage)]:
            return Action(time, ready[-1], BACKWARD, backwards[ready[-1]])
        size = stages // len(group)  # of several stages first those of the micro-batches that came first
        ready = sorted(filter(is_forward_ready, group), key=lambda stage: (forwards[stage] // size, stage))
        return Action(time, ready[0], FORWARD, forwards[ready[0]]) if ready else None

    actions: list[Action] = []
    for time in range(2 * stages * micro_batches):  # as if one worker ran all actions
        chosen = [found for group in groups if (found := next_action(group, time)) is not None]
        for _, stage, kind, _ in chosen:
            (forwards if kind == FORWARD else backwards)[stage] += 1
        actions += chosen
        if backwards[0] == micro_batches:
            break
    return tuple(actions)


def bubble(actions: Sequence[tuple[int, int, str, int]], workers: int) -> float:
    """Return the part of all slots, between 0 and 1, in which a worker has nothing to do."""
    slots = workers * (1 + max(time for time, *_ in actions))
    return 1 - len(actions) / slots
