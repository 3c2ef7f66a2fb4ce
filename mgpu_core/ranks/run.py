r"""One call over several ranks: who is at work, waits for whom, and must stop when.

A *lane* runs the module's own code, as a rule for one rank, in a worker thread of its own or one after the other in the
caller's thread::

    caller    run(calls) ──────────────── waits until every lane has ended ───────── results, or the first failure
    lane 0      ├─ forward ─ meet(value) ─ waits ─────────┐ ─ its result ─ ... ─ end
    lane 1      └─ forward ──────── meet(value): combines ┴ ─ its result ─ ... ─ end

Three things make a lane wait, all of them here.  Each wait is bounded, and ends with an error where it cannot be
fulfilled any more:

* :meth:`Lane.meet`: a value of every lane is needed before any can go on.
* :meth:`Lane.turn`: one lane at a time may work at a stage, in the order of a plan or first come first served.
* :meth:`Lane.wait_for`: another lane must say that it has done something.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import pairwise
from operator import attrgetter
from threading import Condition, Lock
from typing import Any

import torch

from mgpu_core.device.streams import caller_streams, on
from mgpu_core.device.time_limits import time_limit
from mgpu_core.errors import Error
from mgpu_core.ranks.clock import RankClock
from mgpu_core.ranks.compiled import compiler_lent
from mgpu_core.ranks.context import CallerContext
from mgpu_core.ranks.failures import RankExited, raise_failures
from mgpu_core.ranks.random import RankStream, rank_streams
from mgpu_core.ranks.switches import switches_kept
from mgpu_core.ranks.team import Team
from mgpu_core.ranks.workers import Outcome
from mgpu_core.support.null_context import NULL_CONTEXT

__all__ = ["Lane", "Run", "current_lane", "shares_generator"]

Combine = Callable[[list[Any]], Sequence[Any]]

_CPU = torch.device("cpu")
_value_of = attrgetter("value")


class Run:
    """One call of several ranks.

    Args:
        team: a rank per lane.
        clocks: one per lane, for its work; empty: nobody asks for times.
        names: of the lanes in messages, read after a failure; ``None``: ``replica 1 on device cuda:1``.
        plans: by stage the turns in their order, as :meth:`Lane.turn` names them; a stage without a plan serves who
            comes first.

    Attributes:
        team: the same.
        streams: per lane that of the caller, where it works; ``None`` on the CPU.
    """

    def __init__(
        self,
        team: Team,
        *,
        clocks: Sequence[RankClock] = (),
        names: Sequence[str] | None = None,
        plans: Mapping[Hashable, Sequence[Hashable]] | None = None,
    ) -> None:
        self.team = team
        self._clocks, self._names, self._plans = clocks, names, plans or {}
        self._is_bare = team.on_host and not clocks  # there is no device, stream or clock to set
        self.streams: Sequence[torch.Stream | None] = () if self._is_bare else caller_streams(team.devices)
        self._waiting: _Waiting | None = None  # while lanes are in workers: others do not wait

    def run(self, calls: Sequence[Callable[[], Any]], *, draws: bool, workers: str) -> list[Any]:
        """Run the call of each lane and return the results in their order.

        Args:
            calls: one callable per lane, run on the rank's device and the caller's stream; not more than the team has.
            draws: whether ranks that share a random generator must draw from streams of their own.
            workers: ``threads``, each lane in its own worker, the same one in every call; ``caller``, one after the
                other in the caller's thread, as a single one always.

        Raises:
            Exception: the first failing rank's, of the same type: ``Caught KeyError in replica 1 on device cuda:1.``
                and the original traceback; the original is ``__cause__`` and the other ranks' failures are notes.
                ``KeyboardInterrupt`` and ``SystemExit`` pass through.
            Error: a rank did not end within ``MGPU_CORE_TIMEOUT`` seconds.
        """
        draws = draws and shares_generator(self.team)
        if len(calls) == 1:
            outcomes = [self._here(calls[0])]
        elif workers == "caller":
            outcomes = self._in_caller(calls, draws)
        else:
            outcomes = self._in_workers(calls, draws)
        for outcome in outcomes:
            if outcome.error is not None:
                raise_failures(outcomes, self._names or self._default_names())
        return list(map(_value_of, outcomes))

    def alone(self, call: Callable[[], Any]) -> Any:
        """Run the only lane in the caller's thread; its failure stays as it is."""
        return self._placed(0, call)()

    def stop(self, seconds: float) -> bool:
        """Let no lane begin or wait any more; return whether all have ended in that time."""
        return self._waiting is None or self._waiting.stop(seconds)

    def _default_names(self) -> list[str]:
        return [f"replica {rank} on device {self.team.devices[rank]}" for rank in self.team.ranks]

    def _placed(self, rank: int, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return the call on the rank's device and stream, and timed."""
        return call if self._is_bare else partial(self._on_device, rank, call)

    def _on_device(self, rank: int, call: Callable[[], Any]) -> Any:
        clock = self._clocks[rank].running() if self._clocks else NULL_CONTEXT
        with on(self.team.devices[rank], self.streams[rank]), clock:
            return call()

    def _here(self, call: Callable[[], Any]) -> Outcome:
        """Run the only lane in this thread, and in its context."""
        outcome = Outcome()
        try:
            outcome.value = self.alone(call)
        except Exception as error:
            outcome.error = error
        return outcome

    def _in_caller(self, calls: Sequence[Callable[[], Any]], draws: bool) -> list[Outcome]:
        """Run the lanes one after the other in this thread, each in its own context; the first failure ends it."""
        devices = self.team.devices
        numbers = rank_streams(devices) if draws and devices.count(_CPU) > 1 else None
        outcomes: list[Outcome] = []
        for rank, call in enumerate(calls):
            if not self._is_bare:
                call = self._placed(rank, call)
            if numbers is not None:
                call = _drawing(call, numbers[rank])
            outcome = Outcome()
            outcomes += (outcome,)
            try:
                outcome.value = copy_context().run(call)
            except Exception as error:
                outcome.error = error
                break
        return outcomes

    def _in_workers(self, calls: Sequence[Callable[[], Any]], draws: bool) -> list[Outcome]:
        devices = self.team.devices
        if len(calls) > len(devices):
            raise ValueError(f"there are {len(calls)} calls, and {len(devices)} ranks to run them")
        self.streams = self.streams or [None] * len(devices)
        context = CallerContext(devices, draws=draws and devices.count(_CPU) > 1)
        waiting = self._waiting = _Waiting(self._plans, _in_turns(self.team, context.serialize, draws))
        tasks = [context.bind(partial(self._attended, waiting, rank, call), rank) for rank, call in enumerate(calls)]
        with switches_kept(), self.team.workers.lease() as crew:
            return crew.run(tasks, waiting.seconds)

    def _attended(self, waiting: _Waiting, rank: int, call: Callable[[], Any]) -> Any:
        """Run one lane, in its worker."""
        waiting.begin(rank)
        token = _lane.set(Lane(self, rank, waiting))
        try:
            return self._placed(rank, call)()
        except BaseException:
            waiting.has_failed = True
            raise
        finally:
            _lane.reset(token)
            del token  # it holds the lane's variables, and a graph may hold the lane
            waiting.end(rank)


class Lane:
    """A lane, as the code that runs in it sees it; see :func:`current_lane`.

    Attributes:
        run: the call that it belongs to.
        rank: its index.
    """

    def __init__(self, run: Run, rank: int, waiting: _Waiting) -> None:
        self.run, self.rank, self._waiting = run, rank, waiting
        self._meetings: defaultdict[Hashable, int] = defaultdict(int)

    def meet(self, key: Hashable, value: Any, combine: Combine) -> Any:
        """Wait for all lanes, and return this one's entry of ``combine(values)``: a value and a result per rank.

        The last lane to come combines, in its own thread; values and results are in rank order, whoever that is.  A
        lane's n-th meeting under a key is with the n-th of all others.

        Raises:
            RankExited: a lane has ended without coming.
            Error: a lane did not come in time, or lanes run one after the other.
            Exception: raised by ``combine``; in every lane.
        """
        self._meetings[key] += 1
        return self._waiting.meet((key, self._meetings[key]), self.rank, value, combine, len(self.run.team))

    def turn(self, stage: Hashable, name: Hashable = None) -> None:
        """End the lane's turn, and wait for its turn at a stage; that one ends with the lane at the latest.

        Args:
            stage: where one lane at a time may work.
            name: of the turn in the stage's plan; without a plan there is none.

        Raises:
            ValueError: the plan has no such turn left.
            RankExited: another lane has failed, or the call was stopped.
            Error: it did not come in time.
        """
        self._waiting.turn(self.rank, stage, name)

    def end_turn(self) -> None:
        """End the lane's turn, if it has one."""
        self._waiting.end_turn(self.rank)

    def done(self, key: Hashable) -> None:
        """Say that something is done."""
        self._waiting.done(key)

    def wait_for(self, keys: Sequence[Hashable]) -> None:
        """Wait until all of this is done.

        Raises:
            RankExited: another lane has failed, or the call was stopped.
            Error: it was not done in time; names the first of it.
        """
        self._waiting.wait_for(keys)


_lane: ContextVar[Lane | None] = ContextVar("mgpu_core_lane", default=None)


def current_lane() -> Lane | None:
    """Return the lane that this thread works for; ``None`` with a single rank, in the caller, or outside a call."""
    return _lane.get()


class _Waiting:
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
        self._changed = Condition(Lock())
        self._is_stopped = False
        self._at_work = 0
        self._ended: set[int] = set()
        self._before = {later: earlier for group in in_turns for earlier, later in pairwise(group)}
        self._meetings: dict[Hashable, _Meeting] = {}
        self._done: set[Hashable] = set()
        self._planned = {stage: deque(turns) for stage, turns in plans.items()}
        self._queues: defaultdict[Hashable, deque[Hashable]] = defaultdict(deque)  # of stages without a plan
        self._turns: dict[int, deque[Hashable]] = {}  # by lane the queue of which it is the first

    def begin(self, rank: int) -> None:
        """Note that a lane is at work, when the one before it has ended, or failed."""
        before = self._before.get(rank)
        with self._changed:
            in_time = before is None or self._until(lambda: self._is_stopped or before in self._ended)
            if in_time and not self._is_stopped:
                self._at_work += 1
                return
            self._ended.add(rank)
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
            self._changed.notify_all()

    def stop(self, seconds: float) -> bool:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._at_work, seconds)

    def meet(self, key: Hashable, rank: int, value: Any, combine: Combine, ranks: int) -> Any:
        if self._before:
            raise Error(
                "the ranks of this forward run one after another, so none can wait in a synchronised layer: they share "
                "a GPU's random generator (dropout; give each rank a GPU of its own), or are inside a checkpoint"
            )
        with self._changed:
            found = self._meetings.setdefault(key, _Meeting())
            found.values[rank] = value
            is_last = len(found.values) == ranks
        if is_last:
            found.combine(combine)
            with self._changed:
                found.is_over = True
                found.values.clear()
                self._changed.notify_all()
        else:
            with compiler_lent(), self._changed:
                self._await_others(found)
        result, error = self._result_of(key, found, rank)
        del found
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # whose traceback holds this frame

    def _await_others(self, found: _Meeting) -> None:
        self._until(lambda: found.is_over or self._is_stopped or self._ended - found.values.keys())
        if found.is_over:
            return
        if absent := self._ended - found.values.keys():
            raise RankExited(
                f"rank {min(absent)} ended without coming to a layer where all ranks meet: every rank must call the "
                "same synchronised layers, equally often"
            )
        if self._is_stopped:
            raise RankExited("the call was given up while ranks waited in a synchronised layer")
        raise Error(f"a rank did not come to a synchronised layer within {self.seconds:g} s")

    def _result_of(self, key: Hashable, found: _Meeting, rank: int) -> tuple[Any, Exception | None]:
        """Return a lane's result and drop it here: it may have a graph that refers back to this object.

        All lanes raise the same error; it is dropped here when the last one has it.
        """
        with self._changed:
            result, error = found.results.pop(rank), found.error
            if not found.results:
                found.error = None
                del self._meetings[key]
        return result, error

    def turn(self, rank: int, stage: Hashable, name: Hashable) -> None:
        with self._changed:
            self._leave_turn(rank)
            queue = self._planned.get(stage)
            if queue is None:
                queue, name = self._queues[stage], rank
                queue.append(rank)
            elif name not in queue:
                raise ValueError(f"the plan of stage {stage} has no turn {name} left")
            try:
                self._until_done(lambda: queue[0] == name, f"turn {name} at stage {stage} did not come")
            except BaseException:
                queue.remove(name)
                raise
            self._turns[rank] = queue

    def end_turn(self, rank: int) -> None:
        with self._changed:
            self._leave_turn(rank)

    def _leave_turn(self, rank: int) -> None:
        queue = self._turns.pop(rank, None)
        if queue is not None:
            queue.popleft()
            self._changed.notify_all()

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

    def _until_done(self, is_done: Callable[[], bool], late: str | Callable[[], str]) -> None:
        """Wait for something that no longer comes after a failure."""
        in_time = self._until(lambda: self._is_stopped or self.has_failed or is_done())
        if self._is_stopped or self.has_failed:
            raise RankExited("another rank failed, or the call was given up")
        if not in_time:
            raise Error(f"{late if isinstance(late, str) else late()} within {self.seconds:g} s")

    def _until(self, holds: Callable[[], Any]) -> bool:
        """Wait, with the lock; return whether it holds in time."""
        return bool(self._changed.wait_for(holds, self.seconds))


class _Meeting:
    """The values and results of one meeting, by rank."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        self.error: Exception | None = None
        self.is_over = False

    def combine(self, combine: Combine) -> None:
        """Make the results; a failure is every lane's."""
        ranks = range(len(self.values))
        try:
            self.results = dict(enumerate(combine([self.values[rank] for rank in ranks])))
        except Exception as error:
            self.error, self.results = error, dict.fromkeys(ranks)


def shares_generator(team: Team) -> bool:
    """Return whether ranks of the team share a device, and so its random generator."""
    return len(set(team.devices)) < len(team.devices)


def _in_turns(team: Team, all_in_turns: bool, draws: bool) -> list[list[int]]:
    """Return groups of ranks that must take turns: all, or those that share an accelerator and its generator."""
    if all_in_turns:
        return [list(team.ranks)]
    if not draws:
        return []
    shared = [[rank for rank in team.ranks if team.devices[rank] == each] for each in set(team.devices) - {_CPU}]
    return [ranks for ranks in shared if len(ranks) > 1]


def _drawing(task: Callable[[], Any], stream: RankStream | None) -> Callable[[], Any]:
    """Return the task with the random numbers of a stream; ``None``: of the device, as ever."""

    def drawn(entered: RankStream) -> Any:
        with entered.entered():
            return task()

    return task if stream is None else partial(drawn, stream)
