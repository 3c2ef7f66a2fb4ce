"""A rendezvous of the ranks of one forward, for layers that need a value of every rank before any can go on.

    rank 0   forward ... exchange(value) ── waits ──────────────┐
    rank 1   forward ... exchange(value) ── waits ───────────┐  │
    rank 2   forward ... exchange(value), the last to come:  │  │
                         work(all values), in its thread ────┴──┴── each rank gets its own result

Waits are bounded.  A rank that ends before it arrives wakes the others with an error.
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

__all__ = ["RankExited", "RankHandle", "RankRendezvous", "current_rank_handle"]


class RankExited(Error):
    """A rank ended before it reached the rendezvous.  Its own failure, if any, is the one to report."""


class RankRendezvous:
    """Let the ranks of one forward exchange values.

    Args:
        devices, streams: per rank, where it computes.
        seconds: how long a rank waits for the others.
        serialize: some ranks run one after the other, so none can wait for another.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        streams: Sequence[torch.Stream | None],
        seconds: float,
        *,
        serialize: bool,
    ) -> None:
        self.devices, self.streams = devices, streams
        self._seconds, self._serialize = seconds, serialize
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._gone: set[int] = set()
        self._exchanges: dict[Hashable, _Exchange] = {}

    def leave(self, rank: int) -> None:
        """Note that the rank has ended, and wake the ranks that wait for it."""
        with self._lock:
            self._gone.add(rank)
            if self._exchanges:
                self._changed.notify_all()

    def exchange(self, key: Hashable, rank: int, value: Any, work: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for all ranks, and return this rank's entry of ``work(values)``: one value and one result per rank.

        The last rank to arrive runs ``work``, in its own thread.

        Raises:
            RankExited: a rank has ended without calling this.
            Error: a rank did not come in time, or ranks run one after the other.
            Exception: raised by ``work``; on every rank.
        """
        if self._serialize:
            raise Error(
                "the ranks of this forward run one after another, so none can wait in a synchronised layer: they share "
                "a GPU's random generator (dropout; give each rank a GPU of its own), or are inside a checkpoint"
            )
        with self._changed:
            found = self._exchanges.setdefault(key, _Exchange())
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

    def _taken(self, key: Hashable, found: _Exchange, rank: int) -> tuple[Any, Exception | None]:
        """Return a rank's result and drop it here: it may have a graph that refers back to this object.

        All ranks raise the same error; it is dropped here when the last rank has it.
        """
        with self._changed:
            result, error = found.results.pop(rank), found.error
            if not found.results:
                found.error = None
                del self._exchanges[key]
        return result, error

    def _work(self, found: _Exchange, work: Callable[[list[Any]], Sequence[Any]]) -> None:
        try:
            found.results = dict(enumerate(work([found.values[rank] for rank in range(len(self.devices))])))
        except Exception as error:
            found.error, found.results = error, dict.fromkeys(range(len(self.devices)))
        with self._changed:
            found.is_over = True
            found.values.clear()
            self._changed.notify_all()

    def _wait(self, found: _Exchange) -> None:
        with self._changed:
            self._changed.wait_for(lambda: found.is_over or self._gone - found.values.keys(), self._seconds)
            if found.is_over:
                return
            absent = self._gone - found.values.keys()
            if absent:
                raise RankExited(
                    f"rank {min(absent)} ended without coming to a layer where all ranks meet: every rank must "
                    "call the same synchronised layers, equally often"
                )
            raise Error(f"a rank did not come to a synchronised layer within {self._seconds:g} s")


class _Exchange:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        self.error: Exception | None = None
        self.is_over = False


class RankHandle:
    """A rank's access to its rendezvous; pairs its n-th exchange under a key with the n-th of all others.

    Use it as a context manager around the rank's work; inside, :func:`current_rank_handle` returns it.
    """

    def __init__(self, rendezvous: RankRendezvous, rank: int) -> None:
        self.rendezvous, self.rank = rendezvous, rank
        self._times: defaultdict[Hashable, int] = defaultdict(int)

    def __enter__(self) -> None:
        self._token: Token[RankHandle | None] = _handle.set(self)

    def __exit__(self, *_: object) -> None:
        _handle.reset(self._token)
        del self._token  # it holds the rank's variables, and a graph may hold this handle
        self.rendezvous.leave(self.rank)

    def exchange(self, key: Hashable, value: Any, work: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Call :meth:`RankRendezvous.exchange` for this rank."""
        self._times[key] += 1
        return self.rendezvous.exchange((key, self._times[key]), self.rank, value, work)


_handle: ContextVar[RankHandle | None] = ContextVar("mgpu_core_rank_handle", default=None)


def current_rank_handle() -> RankHandle | None:
    """Return the handle of the rank that this thread works for; ``None`` with a single rank or outside a forward."""
    return _handle.get()
