"""The waits of one call's lanes for each other, under one condition; :mod:`mgpu_core.ranks.run` has the drawing."""

from __future__ import annotations

from _thread import LockType
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from threading import Condition, Lock
from typing import Any

from mgpu_core.devices.time_limits import time_limit
from mgpu_core.errors import Error
from mgpu_core.ranks.compiled import compiler_lent
from mgpu_core.ranks.failures import RankExited

__all__ = ["Combine", "Waiting"]

Combine = Callable[[list[Any]], Sequence[Any]]


class Waiting:
    """The state of one call that its lanes share, under one lock.

    Args:
        plans: as for :class:`Run`.
        in_turns: groups of lanes that run one after the other.

    Attributes:
        seconds: how long each wait may take.
        has_failed: a lane has failed: who waits for something to be done, or for a turn, gives up.
    """

    def __init__(self, plans: Mapping[Hashable, Sequence[Hashable]], in_turns: Sequence[Sequence[int]]) -> None:
        self.seconds = time_limit()
        self.has_failed = False
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._is_stopped = False
        self._at_work = 0
        self._ended: set[int] = set()
        self._before = {later: earlier for group in in_turns for earlier, later in pairwise(group)}
        self._meetings: dict[Hashable, _Meeting] = {}
        self._done: set[Hashable] = set()
        self._planned = {stage: deque(turns) for stage, turns in plans.items()}
        self._queues: defaultdict[Hashable, deque[Hashable]] = defaultdict(deque)  # of stages without a plan
        self._turns: dict[Hashable, tuple[deque[Hashable], Hashable]] = {}  # by lane the queue of which it is the first

    def begin(self, rank: int) -> None:
        """Note that a lane is at work, when the one before it has ended, or failed."""
        before = self._before.get(rank)
        with self._changed:
            in_time = before is None or self._until(lambda: self._is_stopped or before in self._ended)
            if in_time and not self._is_stopped:
                self._at_work += 1
                return
            self._ended.add(rank)
            self._open_gates()
            self._changed.notify_all()
        if self._is_stopped:
            raise RankExited("the call was given up before this rank began")
        raise Error(f"the rank before did not end within {self.seconds:g} s")

    def end(self, rank: int) -> None:
        """Note that a lane has ended, and with it its turn."""
        with self._changed:
            self._leave_turn(rank)
            self._at_work -= 1
            self._ended.add(rank)
            self._open_gates()
            self._changed.notify_all()

    def stop(self, seconds: float) -> bool:
        with self._changed:
            self._is_stopped = True
            self._open_gates()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._at_work, seconds)

    def meet(self, key: Hashable, rank: int, value: Any, combine: Combine, ranks: int) -> Any:
        if self._before:
            raise Error(
                "the ranks of this forward run one after another, so none can wait in a synchronised layer: they share "
                "a GPU's random generator (dropout; give each rank a GPU of its own), or are inside a checkpoint"
            )
        gate = None
        with self._lock:
            meeting = self._meetings.get(key)
            if meeting is None:
                meeting = self._meetings[key] = _Meeting(ranks)
            meeting.values[rank] = value
            meeting.missing -= 1
            if meeting.missing and not self._cannot_come(meeting):
                gate = Lock()
                gate.acquire()
                meeting.gates.append(gate)
        if gate is not None:
            with compiler_lent():
                gate.acquire(timeout=self.seconds)
        elif not meeting.missing:
            meeting.combine(combine)
            with self._lock:
                del self._meetings[key]
                meeting.is_over = True
                meeting.open()
        if not meeting.is_over:
            self._give_up(meeting)
        result, meeting.results[rank], error = meeting.results[rank], None, meeting.error
        if error is None:
            return result
        self._drop_error(meeting)
        del meeting  # the traceback holds this frame
        try:
            raise error
        finally:
            del error

    def _cannot_come(self, meeting: _Meeting) -> bool:
        """Return whether not all lanes can come to a meeting any more."""
        return self._is_stopped or any(meeting.values[rank] is _ABSENT for rank in self._ended)

    def _give_up(self, meeting: _Meeting) -> None:
        """Raise why a meeting did not take place, unless it is over now."""
        with self._lock:
            if meeting.is_over:
                return
            absent = [rank for rank in self._ended if meeting.values[rank] is _ABSENT]
            is_stopped = self._is_stopped
        if absent:
            raise RankExited(
                f"rank {min(absent)} ended without coming to a layer where all ranks meet: every rank must call the "
                "same synchronised layers, equally often"
            )
        if is_stopped:
            raise RankExited("the call was given up while ranks waited in a synchronised layer")
        raise Error(f"a rank did not come to a synchronised layer within {self.seconds:g} s")

    def _drop_error(self, meeting: _Meeting) -> None:
        """Forget the error of a meeting when the last lane has it: all lanes raise the same one."""
        with self._lock:
            meeting.missing += 1
            if meeting.missing == len(meeting.results):
                meeting.error = None

    def _open_gates(self) -> None:
        """Let lanes go on that wait for one that does not come; with the lock."""
        for meeting in self._meetings.values():
            if self._cannot_come(meeting):
                meeting.open()

    def turn(self, lane: Hashable, stage: Hashable, name: Hashable = None) -> None:
        with self._changed:
            self._leave_turn(lane)
            queue = self._planned.get(stage)
            if queue is not None and name not in queue:
                raise ValueError(f"the plan of stage {stage} has no turn {name} left")
            try:
                if queue is None:
                    queue, name = self._queues[stage], lane
                    queue.append(lane)
                self._until_done(lambda: queue[0] == name, lambda: f"turn {name} at stage {stage} did not come")
                self._turns[lane] = queue, name
            except BaseException:  # Ctrl-C, too, anywhere in here
                self._turns.pop(lane, None)
                if queue is not None and name in queue:
                    queue.remove(name)
                    self._changed.notify_all()
                raise

    def end_turn(self, lane: Hashable) -> None:
        with self._changed:
            self._leave_turn(lane)

    def _leave_turn(self, lane: Hashable) -> None:
        """End a lane's turn, if it has one; may be called again where Ctrl-C has cut it off."""
        queue, name = self._turns.get(lane, ((), None))
        if queue and queue[0] == name:
            queue.popleft()
            self._changed.notify_all()
        self._turns.pop(lane, None)

    def done(self, key: Hashable) -> None:
        with self._changed:
            self._done.add(key)
            self._changed.notify_all()

    def wait_for(self, keys: Sequence[Hashable]) -> None:
        with self._changed:
            self._until_done(
                lambda: self._done.issuperset(keys),
                lambda: f"{next(key for key in keys if key not in self._done)} was not done",
            )

    def _until_done(self, is_done: Callable[[], bool], late: Callable[[], str]) -> None:
        """Wait for something that no longer comes after a failure."""
        in_time = self._until(lambda: self._is_stopped or self.has_failed or is_done())
        if self._is_stopped or self.has_failed:
            raise RankExited("another rank failed, or the call was given up")
        if not in_time:
            raise Error(f"{late()} within {self.seconds:g} s")

    def _until(self, holds: Callable[[], Any]) -> bool:
        """Wait, with the lock; return whether it holds in time."""
        return bool(self._changed.wait_for(holds, self.seconds))


_ABSENT = object()


class _Meeting:
    """The values and results of one meeting, by rank, and a lock for each lane that waits."""

    def __init__(self, ranks: int) -> None:
        self.values: list[Any] = [_ABSENT] * ranks
        self.missing = ranks
        self.results: list[Any] = [None] * ranks
        self.error: Exception | None = None
        self.is_over = False
        self.gates: list[LockType] = []

    def open(self) -> None:
        """Let the lanes go on that wait; with the lock."""
        while self.gates:
            self.gates.pop().release()

    def combine(self, combine: Combine) -> None:
        """Make the results; a failure is every lane's."""
        values, self.values = self.values, [None] * len(self.values)  # no rank is absent
        try:
            self.results = list(combine(values))
        except Exception as error:
            self.error = error
