"""What one recording keeps: entries, and the whole steps that they are part of.

A whole step is one call of ``TrainStep`` or one forward of ``DataParallel``; it has a number that no other step of the
process has.  Whoever works for it, in whatever thread and at whatever time, says the number: a backward is part of its
own forward, however many forwards came since.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from mgpu_core.entries import NO_STEP, Entry

__all__ = ["Clock", "Draft", "HostClock", "Recording", "WholeStep"]


class Clock(Protocol):
    """Tells the time on devices whose work is later than its launch."""

    def mark(self, device: torch.device) -> object:
        """Return a moment in the work of the device's current stream; ``None``: the host's time is used."""

    def ns(self, mark: Any) -> int:
        """When it was, by the host's clock; waits for it."""


class HostClock:
    """For devices without a time of their own."""

    def mark(self, _device: torch.device) -> object:
        """Return None: the host's time is used."""
        return None

    def ns(self, mark: Any) -> int:
        """There are no marks."""
        raise NotImplementedError


class WholeStep(NamedTuple):
    """A whole step that was seen to begin."""

    name: str
    begin_ns: int


Draft: TypeAlias = Callable[[Clock], Entry]
_numbers = count(NO_STEP + 1)  # of the process: what an earlier recording has numbered is unknown to this one


@dataclass(slots=True)
class Recording:
    """What one recording keeps; added to by any thread.  Read it after its end, when all times are known.

    Args:
        clock: of the devices.
        skip: so many whole steps pass before anything is kept.
        steps: so many are kept, and the next one to begin ends the recording, once those are over; ``None``: all.
        limit: so many entries are kept, and those behind them counted alone: a recording that was forgotten must not
            fill the memory.

    Attributes:
        whole_steps: those that are kept, by their numbers, in the order in which they began.
        entries: in the order in which they ended, after the recording.
        dropped: how many there were too many.
        failure: what went wrong while it was told, and ended it; a step never learns of it.
    """

    clock: Clock = field(default_factory=HostClock)
    skip: int = 0
    steps: int | None = None
    limit: int = 200_000
    whole_steps: dict[int, WholeStep] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    dropped: int = 0
    failure: Exception | None = None
    _passed: set[int] = field(default_factory=set)  # numbers of steps that are not kept
    _open: set[int] = field(default_factory=set)  # of those that have not ended
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _drafts: list[tuple[int, Draft]] = field(default_factory=list)
    _process: int = field(default_factory=os.getpid)

    def is_inside(self, number: int) -> bool:
        """Return whether the step has begun in this recording, and not ended."""
        return number in self._open

    def begin_step(self, name: str) -> int:
        """Return the number of a whole step that begins."""
        with self._lock:
            number = next(_numbers)
            self._open.add(number)
            if len(self._passed) < self.skip or self._is_full():
                self._passed.add(number)
            elif not self.dropped:
                self.whole_steps[number] = WholeStep(name, time.perf_counter_ns())
            return number

    def end_step(self, number: int) -> None:
        """Note the end of a whole step; later entries of it are its backward."""
        with self._lock:
            self._open.discard(number)

    def is_over(self) -> bool:
        """Return whether all steps that are wanted have begun and ended."""
        with self._lock:
            return self._is_full() and self._open.isdisjoint(self.whole_steps)

    def _is_full(self) -> bool:
        return self.steps is not None and len(self.whole_steps) >= self.steps

    def add(self, number: int, draft: Draft) -> None:
        """Keep an entry whose times are known at the end; ``number``: of the whole step it is part of.

        What is part of none is kept once the steps to skip are over.
        """
        if number in self._passed or (number not in self.whole_steps and self._is_before_the_first()):
            return
        if len(self._drafts) < self.limit:
            self._drafts.append((number if number in self.whole_steps else NO_STEP, draft))
        else:
            self.dropped += 1

    def _is_before_the_first(self) -> bool:
        return self.skip > 0 and not self.whole_steps

    def forget_threads(self) -> None:
        """Replace the lock in a forked child, in which its holder does not exist."""
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Wait for the devices, and fill ``entries``.  In a forked child there are none: they are its parent's."""
        if os.getpid() == self._process:
            self.entries = [replace(draft(self.clock), whole_step=number) for number, draft in self._drafts]
        self._drafts.clear()
