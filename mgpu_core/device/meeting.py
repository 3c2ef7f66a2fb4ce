"""Where the ranks of one forward meet: what needs something of all of them, before any can go on.

The last rank to arrive does the work for all, in its thread; the others wait, with a limit.  A rank that ends before
it arrives lets the others go with an error, so nobody waits for somebody who will not come.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar, Token
from typing import Any

import torch

from mgpu_core.device.compiled import compiler_lent
from mgpu_core.errors import Error

__all__ = ["AbsentRank", "Meeting", "Seat", "current_seat"]


class AbsentRank(Error):
    """A rank ended before it came to where the others wait.  Its own failure, if it had one, is what matters."""


class Meeting:
    """Of the ranks of one forward.

    Args:
        devices, streams: per rank, where it computes.
        seconds: how long anybody waits for the others.
        in_turns: some ranks run one after the other, so they cannot meet.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        streams: Sequence[torch.Stream | None],
        seconds: float,
        *,
        in_turns: bool,
    ) -> None:
        self.devices, self.streams = devices, streams
        self._seconds, self._in_turns = seconds, in_turns
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._gone: set[int] = set()
        self._rounds: dict[Hashable, _Round] = {}

    def leave(self, rank: int) -> None:
        """Note that the rank has ended, and wake the ranks that wait for it."""
        with self._lock:
            self._gone.add(rank)
            if self._rounds:
                self._changed.notify_all()

    def together(self, key: Hashable, rank: int, value: Any, work: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Bring ``value``; return this rank's of the results that ``work(values)`` has made of all ranks' values.

        Raises:
            AbsentRank: a rank has ended without coming here.
            Error: a rank did not come in time, or ranks take turns.
            Exception: what the work raised, on every rank.
        """
        if self._in_turns:
            raise Error(
                "the ranks of this forward take turns and cannot meet in a synchronised layer: they share a GPU's "
                "random generator (dropout; give each rank a GPU of its own), or are inside a checkpoint"
            )
        with self._changed:
            found = self._rounds.setdefault(key, _Round())
            found.values[rank] = value
            is_last = len(found.values) == len(self.devices)
        if is_last:
            self._work(found, work)
        else:
            with compiler_lent():
                self._wait(found)
        result, error = self._taken(key, found, rank)
        del found
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # whose traceback holds this frame

    def _taken(self, key: Hashable, found: _Round, rank: int) -> tuple[Any, Exception | None]:
        """Return a rank's result and drop it here: it may have a graph, and graphs may hold what holds this.

        Of an error all ranks have the same one; when the last has it, nobody holds that either.
        """
        with self._changed:
            result, error = found.results.pop(rank), found.error
            if not found.results:
                found.error = None
                del self._rounds[key]
        return result, error

    def _work(self, found: _Round, work: Callable[[list[Any]], Sequence[Any]]) -> None:
        try:
            found.results = dict(enumerate(work([found.values[rank] for rank in range(len(self.devices))])))
        except Exception as error:
            found.error, found.results = error, dict.fromkeys(range(len(self.devices)))
        with self._changed:
            found.is_over = True
            found.values.clear()
            self._changed.notify_all()

    def _wait(self, found: _Round) -> None:
        with self._changed:
            self._changed.wait_for(lambda: found.is_over or self._gone - found.values.keys(), self._seconds)
            if found.is_over:
                return
            absent = self._gone - found.values.keys()
            if absent:
                raise AbsentRank(
                    f"rank {min(absent)} ended without coming to a layer where all ranks meet: every rank must "
                    "call the same synchronised layers, equally often"
                )
            raise Error(f"a rank did not come to a synchronised layer within {self._seconds:g} s")


class _Round:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        self.error: Exception | None = None
        self.is_over = False


class Seat:
    """A rank's place in a meeting; counts how often it came for each reason.

    ``with seat:`` is around the work of the rank: inside, :func:`current_seat` is this one.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank
        self._times: defaultdict[Hashable, int] = defaultdict(int)

    def __enter__(self) -> None:
        self._token: Token[Seat | None] = _seat.set(self)

    def __exit__(self, *_: object) -> None:
        _seat.reset(self._token)
        del self._token  # it holds the rank's variables, and a graph may hold the seat
        self.meeting.leave(self.rank)

    def together(self, key: Hashable, value: Any, work: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """:meth:`Meeting.together`, for the n-th time of this rank with all others' n-th time."""
        self._times[key] += 1
        return self.meeting.together((key, self._times[key]), self.rank, value, work)


_seat: ContextVar[Seat | None] = ContextVar("mgpu_core_seat", default=None)


def current_seat() -> Seat | None:
    """Return the seat of the rank that this thread works for; ``None`` where one rank works alone, or none does."""
    return _seat.get()
