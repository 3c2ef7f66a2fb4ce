"""How many rows each rank gets, where devices are not equally fast: measured over the first steps, then kept.

Every rank's time for its own rows is taken.  When the split that these speeds ask for would be clearly better than the
one there is, it is taken over, on trial: where the slowest rank is not faster by at least half of the predicted
gain, the split before comes back, and the next trial is twice as far away.  For times are not in proportion to rows
where steps are short: the rank with more rows then only looks faster.  A difference within the noise changes nothing,
because every change costs a new shape (kernels are chosen, graphs captured, anew).  A rank never gets more rows than
its device's memory has room for, nor fewer than two, which batch normalisation needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import truediv
from statistics import median
from typing import NamedTuple

import torch

from mgpu_core.devices.plug_ins import total_nbytes
from mgpu_core.parallel.scatter_inputs import check_shares
from mgpu_core.ranks.rank_clock import RankClock
from mgpu_core.ranks.team import Team
from mgpu_core.ranks.worker_choice import Workers
from mgpu_core.support.tables import Table, html_of

__all__ = ["AutoShares", "StepPlan", "RankPlan", "SplitPlan"]

WARM_UP = 3  # steps whose time says little: kernels are chosen, memory is allocated
SAMPLES = 5  # steps that a decision is made from
GAIN = 1.05  # how much faster the other split must be
LEAST_ROWS = 2
LONGEST_WAIT = 1000  # steps that a decision is made from, after trials that failed
CLOCKS_KEPT = 8  # calls whose times a GPU may still owe


class RankPlan(NamedTuple):
    """The work of one rank in a step.

    Attributes:
        rank, device: which rank, and where it computes.
        share: its part of the rows, of 1.
        rows: that it had in the last call; 0 before the first.
        workers: ``threads``: it runs in a thread of its own; ``caller``: in the caller's, one rank after the other.
        why: the reason for that.
    """

    rank: int
    device: torch.device
    share: float
    rows: int
    workers: str
    why: str


class StepPlan(list[RankPlan]):
    """One :class:`RankPlan` per rank; a notebook shows a table."""

    def _repr_html_(self) -> str:
        cells = ((each.rank, each.device, f"{each.share:.1%}", each.rows, each.workers, each.why) for each in self)
        return html_of([Table([RankPlan._fields, *cells], words=(1, 4, 5))])


class _Trial(NamedTuple):
    """The split before a change, and the predicted gain: how many times faster the slowest rank would be."""

    shares: list[float]
    slowest: float
    gain: float


class AutoShares:
    """Shares that follow the ranks' speeds.

    Args:
        ranks: how many.

    Attributes:
        shares: one positive number per rank, together 1.
    """

    def __init__(self, ranks: int) -> None:
        self.shares = [1.0 / ranks] * ranks
        self._wait = SAMPLES
        self._trial: _Trial | None = None
        self._seen = 0  # steps since the last change
        self._samples: list[tuple[Sequence[int], list[float]]] = []  # per step: rows and seconds of each rank

    def observe(self, rows: Sequence[int], seconds: Sequence[float | None], room: Sequence[int | None]) -> bool:
        """Take in the times of one step; return whether the shares have changed.

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
        self._samples.append((rows, [each or 1.0 for each in seconds]))
        if len(self._samples) < self._wait:
            return False
        changed = self._has_failed() or self._consider(rows, room)
        self._samples = []
        if changed:
            self._seen = 0
        return changed

    def _has_failed(self) -> bool:
        """Return True, and restore the split before, if the trial gained less than half of the prediction."""
        trial, self._trial = self._trial, None
        if trial is None or self._slowest() * (1 + trial.gain) / 2 <= trial.slowest:
            return False
        self.shares, self._wait = trial.shares, min(2 * self._wait, LONGEST_WAIT)
        return True

    def _times(self) -> list[list[float]]:
        """Return, per step and rank, its seconds divided by the rows of all ranks."""
        return [[each / sum(rows) for each in taken] for rows, taken in self._samples]

    def _slowest(self) -> float:
        return median(map(max, self._times()))

    def _consider(self, rows: Sequence[int], room: Sequence[int | None]) -> bool:
        speeds = [median(each) for each in zip(*(map(truediv, *sample) for sample in self._samples), strict=True)]
        total = sum(rows)
        wanted = _capped([total * speed / sum(speeds) for speed in speeds], room)
        now, then = (max(n / speed for n, speed in zip(of, speeds, strict=True)) for of in (rows, wanted))
        too_many = any(limit is not None and count > limit for count, limit in zip(rows, room, strict=True))
        if not too_many and (now < GAIN * then or not self._differ()):
            return False
        self._trial = None if too_many else _Trial(self.shares, self._slowest(), now / then)
        wanted = [max(count, min(LEAST_ROWS, total / len(rows))) for count in wanted]
        self.shares = [count / sum(wanted) for count in wanted]
        return True

    def _differ(self) -> bool:
        """Return whether the slowest and the fastest rank differ by more than the times of either vary."""
        times: list[list[float]] = sorted(map(sorted, zip(*self._times(), strict=True)), key=median)
        outer = len(self._samples) // 4  # a quarter on each side may be chance
        return times[-1][outer] > times[0][-1 - outer]


def _capped(rows: list[float], room: Sequence[int | None]) -> list[float]:
    """Return rows within each rank's room; others take the excess, in proportion.  If all are full: unchanged."""
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


def _room_for_rows(device: torch.device, rows: int) -> int | None:
    """Return for how many rows a device has memory, judged by the most that it has held; ``None``: unknown."""
    total = total_nbytes(device) if rows else None
    if total is None:
        return None
    peak = torch.accelerator.max_memory_reserved(device)
    return max(1, int(rows * 0.9 * total / peak)) if peak else None


class SplitPlan:
    """How a step cuts its rows: equally, in the user's proportion, or as fast as the ranks turn out to be.

    Args:
        shares: one positive number per rank, ``"auto"``, or ``None``.
        team: the ranks.

    Attributes:
        asked: the shares, as they were given.
        shares: for the next call.
        rows: of each rank in the last call.
        is_timed: they follow the ranks' speeds, so each call is timed.

    Raises:
        ValueError: other shares.
    """

    def __init__(self, shares: Sequence[float] | str | None, team: Team) -> None:
        self._team = team
        self.rows: list[int] = []
        self.use(shares)

    def use(self, shares: Sequence[float] | str | None) -> None:
        """Use other shares from the next call on; ValueError as above, which changes nothing."""
        if isinstance(shares, str):
            if shares != "auto":
                raise ValueError(f'shares must be one number per rank or "auto", not {shares!r}')
        else:
            check_shares(shares, len(self._team))
        self.asked = shares
        self._auto = AutoShares(len(self._team)) if isinstance(shares, str) else None
        self.shares: Sequence[float] | None = self._auto.shares if self._auto else shares  # type: ignore[assignment]
        self.is_timed = self._auto is not None
        self._timed: deque[tuple[Sequence[RankClock], list[int]]] = deque(maxlen=CLOCKS_KEPT)

    def why_not_recorded(self) -> str | None:
        """Return why a graph cannot hold a step that is cut like this; ``None``: it can."""
        return 'shares="auto" takes the time of each rank' if self.is_timed else None

    def clocks(self) -> list[RankClock]:
        """Return a clock per rank for one call; none if nothing is measured."""
        return [] if self._auto is None else [RankClock(device) for device in self._team.devices]

    def take_times(self, rows: list[int], clocks: Sequence[RankClock]) -> None:
        """Keep the clocks that timed the ranks of a call, which had so many rows."""
        self._timed.append((clocks, rows))

    def follow_the_clocks(self) -> None:
        """Let the times of earlier calls decide on the shares of the next one, without waiting for a GPU."""
        while self._auto is not None and self._timed:
            clocks, rows = self._timed[0]
            seconds = [clock.seconds() for clock in clocks[: len(rows)]]
            if None in seconds and len(self._timed) < CLOCKS_KEPT:
                return  # a GPU has not finished; a later call asks again
            self._timed.popleft()
            room = [_room_for_rows(device, count) for device, count in zip(self._team.devices, rows, strict=False)]
            if self._auto.observe(rows, seconds, room):
                self.shares = self._auto.shares
                self._timed.clear()  # what was measured with other shares

    def table(self, workers: Workers) -> StepPlan:
        """Return the work of each rank; ``workers`` is how they run."""
        shares = self.shares or [1.0] * len(self._team)
        rows = [*self.rows, *[0] * (len(self._team) - len(self.rows))]
        return StepPlan(
            RankPlan(rank, device, shares[rank] / sum(shares), rows[rank], *workers)
            for rank, device in enumerate(self._team.devices)
        )

    def measured(self) -> list[float] | None:
        """Return the shares that were found by measuring, for a state."""
        return None if self._auto is None else list(self._auto.shares)

    def resume(self, shares: Sequence[float] | None) -> None:
        """Use the shares of a state, if they are measured here and fit this team."""
        if self._auto is not None and len(shares or ()) == len(self._team):
            self._auto.shares = self.shares = list(shares or ())
