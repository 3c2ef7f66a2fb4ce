"""What happened, for those who want to see it: one flag, spans and events.

Every step of the road opens a span, every transfer reports an event.  With recording off, which is the normal state,
a span is one shared object that does nothing.  Everyone imports this file; it imports none of ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

__all__ = ["ALL_RANKS", "Entry", "Recording", "event", "is_on", "recording", "span"]

ALL_RANKS = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """One span (``end_ns > begin_ns``) or event (equal times); times in ns of ``time.perf_counter_ns``."""

    step: str
    rank: int
    nbytes: int
    detail: str
    begin_ns: int
    end_ns: int
    thread: int


@dataclass(slots=True)
class Recording:
    """The entries of one recording, in the order in which they ended; appended to by any thread."""

    entries: list[Entry] = field(default_factory=list)

    def steps(self) -> list[str]:
        """The names of the entries, in order."""
        return [entry.step for entry in self.entries]


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Span:
    __slots__ = ("_begin_ns", "_detail", "_nbytes", "_rank", "_step", "_story")

    def __init__(self, story: Recording, step: str, rank: int, nbytes: int, detail: str) -> None:
        self._story, self._step, self._rank, self._nbytes, self._detail = story, step, rank, nbytes, detail
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        _add(self._story, self._step, self._rank, self._nbytes, self._detail, self._begin_ns)


_NOTHING = _Nothing()
_story: Recording | None = None  # the flag


def _add(story: Recording, step: str, rank: int, nbytes: int, detail: str, begin_ns: int) -> None:
    end_ns = time.perf_counter_ns()
    story.entries.append(Entry(step, rank, nbytes, detail, begin_ns or end_ns, end_ns, threading.get_ident()))


def span(step: str, rank: int = ALL_RANKS, nbytes: int = 0, detail: str = "") -> AbstractContextManager[None]:
    """A context manager around one step of the road; nothing when no recording is on."""
    story = _story
    return _NOTHING if story is None else _Span(story, step, rank, nbytes, detail)


def is_on() -> bool:
    """Whether a recording is on: ask before computing what only an event needs."""
    return _story is not None


def event(step: str, rank: int = ALL_RANKS, nbytes: int = 0, detail: str = "") -> None:
    """Something that moved ``nbytes`` to or from ``rank``; nothing when no recording is on."""
    story = _story
    if story is not None:
        _add(story, step, rank, nbytes, detail, 0)


@contextmanager
def recording() -> Iterator[Recording]:
    """Records everything that the process does meanwhile, in all its threads.

    Raises:
        RuntimeError: a recording is already on.
    """
    global _story
    if _story is not None:
        raise RuntimeError("a recording is already on: there is one per process")
    _story = story = Recording()
    try:
        yield story
    finally:
        _story = None
