r"""One call over several ranks: who is at work, waits for whom, and must stop when.

A *lane* runs the module's own code, as a rule for one rank: in a worker thread of its own, or in the caller's thread,
where lanes run one after the other::

    caller    run(calls) ──────────────── waits until every lane has ended ───────── results, or the first failure
    lane 0      ├─ forward ─ meet(value) ─ waits ─────────┐ ─ its result ─ ... ─ end
    lane 1      └─ forward ──────── meet(value): combines ┴ ─ its result ─ ... ─ end

Three things make a lane wait; `waiting.py` has them.  Each wait is bounded, and ends with an error where it cannot be
fulfilled any more:

* :meth:`Lane.meet`: a value of every lane is needed before any can go on.
* :meth:`Lane.turn`: one lane at a time may work at a stage, in the order of a plan or first come first served.
* :meth:`Lane.wait_for`: another lane must say that it has done something.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from mgpu_core.devices.streams import caller_streams, on
from mgpu_core.ranks.context import CallerContext
from mgpu_core.ranks.draws import Draws, Numbers
from mgpu_core.ranks.failures import raise_failures
from mgpu_core.ranks.random import RankStream
from mgpu_core.ranks.rank_clock import RankClock
from mgpu_core.ranks.switches import switches_kept
from mgpu_core.ranks.team import Team
from mgpu_core.ranks.waiting import Combine, Waiting
from mgpu_core.ranks.workers import Outcome
from mgpu_core.support.null_context import NULL_CONTEXT

__all__ = ["Lane", "Run", "current_lane", "shares_generator"]

_CPU = torch.device("cpu")
_error_of, _value_of = attrgetter("error"), attrgetter("value")


class Run:
    """One call of several ranks.

    Args:
        team: a rank per lane.
        clocks: one per lane, to time its work; empty: it is not timed.
        names: of the lanes in messages, read after a failure; ``None``: ``replica 1 on device cuda:1``.
        at_once: how many lanes compute on the CPU at once, and share its cores; ``None``: all that are there.
        plans: by stage the turns in their order, as :meth:`Lane.turn` names them; a stage without a plan serves who
            comes first.

    Attributes:
        team: the same.
        streams: per lane that of the caller, where it works; ``None`` on the CPU.
        numbers: the random numbers of the call; ``None``: nobody asks whether it draws.
        token: left by a meeting of all lanes for the next one; ``None``: nothing.
    """

    def __init__(
        self,
        team: Team,
        *,
        clocks: Sequence[RankClock] = (),
        names: Sequence[str] | None = None,
        plans: Mapping[Hashable, Sequence[Hashable]] | None = None,
        at_once: int | None = None,
    ) -> None:
        self.team = team
        self._clocks, self._names, self._plans, self._at_once = clocks, names, plans or {}, at_once
        self._is_bare = team.on_host and not clocks  # there is no device, stream or clock to set
        self.streams: Sequence[torch.Stream | None] = () if self._is_bare else caller_streams(team.devices)
        self.numbers: Numbers | None = None
        self.token: Any = None
        self._waiting: Waiting | None = None  # while lanes are in workers: others do not wait

    def run(
        self, calls: Sequence[Callable[[], Any]], *, draws: Draws | None, workers: str, form: Hashable = None
    ) -> list[Any]:
        """Run the call of each lane and return the results in their order.

        Args:
            calls: one callable per lane, run on the rank's device and the caller's stream; not more than the team has.
            draws: finds out whether ranks draw random numbers, and need streams of their own; ``None``: they have none.
            workers: ``threads``, each lane in its own worker, the same one in every call; ``caller``, one after the
                other in the caller's thread, as a single one always.
            form: of the call, for ``draws``.

        Raises:
            Exception: the first failing rank's, of the same type: ``Caught KeyError in replica 1 on device cuda:1.``
                and the original traceback; the original is ``__cause__`` and the other ranks' failures are notes.
                ``KeyboardInterrupt`` and ``SystemExit`` pass through.
            Error: a rank did not end within ``MGPU_CORE_TIMEOUT`` seconds.
        """
        streams, are_several = None, len(calls) > 1
        if draws is not None and are_several:
            self.numbers = draws.begin(self.team, form)
            streams = self.numbers.streams
        try:
            if not are_several or workers == "caller":
                values = self._in_caller(calls, streams, are_several=are_several)
            else:
                outcomes = self._in_workers(calls, streams)
                failures = list(map(_error_of, outcomes))
                if any(failures):
                    for outcome in outcomes:
                        outcome.error = None  # its job may live on
                    self._raise(failures)
                values = list(map(_value_of, outcomes))
        except BaseException:
            if self.numbers is not None and not self.numbers.were_used():
                self.numbers.undo()
            raise
        if draws is not None and self.numbers is not None:
            draws.end(self.numbers, in_threads=workers == "threads")
        return values

    def alone(self, call: Callable[[], Any]) -> Any:
        """Run the only lane in the caller's thread; its failure stays as it is."""
        return self._placed(0, call)()

    def stop(self, seconds: float) -> bool:
        """Let no lane begin or wait any more; return whether all have ended in that time."""
        return self._waiting is None or self._waiting.stop(seconds)

    def _raise(self, failures: list[BaseException | None]) -> None:
        names = self._names or [f"replica {rank} on device {self.team.devices[rank]}" for rank in self.team.ranks]
        raise_failures(failures, names)

    def _placed(self, rank: int, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return the call on the rank's device and stream, and timed."""
        return call if self._is_bare else partial(self._on_device, rank, call)

    def _on_device(self, rank: int, call: Callable[[], Any]) -> Any:
        clock = self._clocks[rank].running() if self._clocks else NULL_CONTEXT
        with on(self.team.devices[rank], self.streams[rank]), clock:
            return call()

    def _in_caller(
        self, calls: Sequence[Callable[[], Any]], streams: Sequence[RankStream] | None, *, are_several: bool
    ) -> list[Any]:
        """Run the lanes one after the other in this thread, several in contexts of their own; a failure ends it."""
        values: list[Any] = []
        for rank, call in enumerate(calls):
            if not self._is_bare:
                call = self._placed(rank, call)
            if streams is not None:
                call = partial(_drawn, call, streams[rank])
            try:
                values += (copy_context().run(call) if are_several else call(),)
                continue
            except Exception as error:
                failures: list[BaseException | None] = [*[None] * rank, error]
            self._raise(failures)
        return values

    def _in_workers(self, calls: Sequence[Callable[[], Any]], streams: Sequence[RankStream] | None) -> list[Outcome]:
        devices = self.team.devices
        if len(calls) > len(devices):
            raise ValueError(f"there are {len(calls)} calls, and {len(devices)} ranks to run them")
        self.streams = self.streams or [None] * len(devices)
        context = CallerContext(devices, streams)
        draws = self.numbers is not None and self.numbers.in_turns
        turns = _in_turns(self.team, context.serialize, draws=draws)
        waiting = self._waiting = Waiting(self._plans, turns)
        tasks = [context.bind(partial(self._attended, waiting, rank, call), rank) for rank, call in enumerate(calls)]
        with switches_kept(), self.team.workers.lease(self._at_once) as crew:
            return crew.run(tasks, waiting.seconds)

    def _attended(self, waiting: Waiting, rank: int, call: Callable[[], Any]) -> Any:
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

    def __init__(self, run: Run, rank: int, waiting: Waiting) -> None:
        self.run, self.rank, self._waiting = run, rank, waiting
        self._meetings: defaultdict[Hashable, int] = defaultdict(int)
        self._ranks = len(run.team.devices)

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
        return self._waiting.meet((key, self._meetings[key]), self.rank, value, combine, self._ranks)

    def turn(self, stage: Hashable, name: Hashable = None) -> None:
        """End the lane's turn, and wait for its turn at a stage; that one ends with the lane at the latest.

        Args:
            stage: where one lane at a time may work.
            name: of the turn in the stage's plan; ``None`` at a stage without one.

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


def shares_generator(team: Team) -> bool:
    """Return whether ranks of the team share a device, and so its random generator."""
    return len(set(team.devices)) < len(team.devices)


def _in_turns(team: Team, all_in_turns: bool, *, draws: bool) -> list[list[int]]:
    """Return groups of ranks that must take turns: all, or those that share an accelerator and its generator."""
    if all_in_turns:
        return [list(team.ranks)]
    if not draws:
        return []
    shared = [[rank for rank in team.ranks if team.devices[rank] == each] for each in set(team.devices) - {_CPU}]
    return [ranks for ranks in shared if len(ranks) > 1]


def _drawn(task: Callable[[], Any], stream: RankStream) -> Any:
    """Run a task with the random numbers of a stream."""
    with stream.entered():
        return task()
