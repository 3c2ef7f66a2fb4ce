"""How many rows each rank gets, where devices are not equally fast: measured over the first steps, then kept.

Every rank's time for its own rows is taken.  When the split that these speeds ask for would be clearly better than the
one there is, it is taken over; a difference within the noise changes nothing, because every change costs a new shape
(kernels are chosen, graphs captured, anew).  A rank never gets more rows than its device's memory has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

__all__ = ["AutoShares", "RankPlan", "room_for_rows"]

WARM_UP = 3  # steps whose time says little: kernels are chosen, memory is allocated
SAMPLES = 5  # steps that a decision is made from
GAIN = 1.05  # how much faster the other split must be


class RankPlan(NamedTuple):
    """What one rank does in a step.

    Attributes:
        rank, device: which rank, and where it computes.
        share: its part of the rows, of 1.
        rows: that it had in the last call; 0 before the first.
    """

    rank: int
    device: torch.device
    share: float
    rows: int


class AutoShares:
    """Shares that follow the ranks' speeds.

    Args:
        ranks: how many.

    Attributes:
        shares: one positive number per rank, together 1.
    """

    def __init__(self, ranks: int) -> None:
        self.shares = [1.0 / ranks] * ranks
        self._seen = 0
        self._speeds: list[list[float]] = [[] for _ in range(ranks)]

    def observe(self, rows: Sequence[int], seconds: Sequence[float | None], room: Sequence[int | None]) -> bool:
        """Takes one step's times in; says whether the shares have changed.

        Args:
            rows: of each rank in that step.
            seconds: that each rank took; ``None`` where it is not known.
            room: rows that each rank's device has memory for; ``None``: no limit is known.
        """
        if len(rows) < len(self.shares) or not all(rows) or not all(seconds):
            return False  # some had nothing to do: nothing to compare
        self._seen += 1
        if self._seen <= WARM_UP:
            return False
        for speeds, count, taken in zip(self._speeds, rows, seconds, strict=True):
            speeds.append(count / (taken or 1.0))
        if len(self._speeds[0]) < SAMPLES:
            return False
        speeds = [median(each) for each in self._speeds]
        self._speeds = [[] for _ in rows]
        return self._consider(rows, speeds, room)

    def _consider(self, rows: Sequence[int], speeds: Sequence[float], room: Sequence[int | None]) -> bool:
        total = sum(rows)
        wanted = _capped([total * speed / sum(speeds) for speed in speeds], room)
        now, then = (max(n / speed for n, speed in zip(of, speeds, strict=True)) for of in (rows, wanted))
        too_many = any(limit is not None and count > limit for count, limit in zip(rows, room, strict=True))
        if now < GAIN * then and not too_many:
            return False
        self.shares = [count / sum(wanted) for count in wanted]
        return True


def _capped(rows: list[float], room: Sequence[int | None]) -> list[float]:
    """Rows within each rank's room; what one cannot take, the others share in proportion.  All full: as it was."""
    full: set[int] = set()
    while True:
        over = {i for i, limit in enumerate(room) if limit is not None and i not in full and rows[i] > limit}
        free = [i for i in range(len(rows)) if i not in full | over]
        if not over or not free:
            return rows
        excess = sum(rows[i] - (room[i] or 0) for i in over)
        weight = sum(rows[i] for i in free)
        rows = [
            float(room[i] or 1) if i in over else rows[i] + excess * rows[i] / weight if i in free else rows[i]
            for i in range(len(rows))
        ]
        full |= over


def room_for_rows(device: torch.device, rows: int) -> int | None:
    """How many rows a device would have memory for, judged by the most that it has held so far; ``None``: unknown."""
    if device.type != "cuda" or not rows:
        return None
    _, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_reserved(device)
    return max(1, int(rows * 0.9 * total / peak)) if peak else None
