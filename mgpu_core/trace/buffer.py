"""The trace buffer: events, and the whole steps that they belong to.

A whole step is one call of ``TrainStep`` or one forward of ``DataParallel``; its number is unique in the process.  An
event carries that number, so a backward belongs to its own forward, however many forwards ran since.  The batches of
predictors are no whole steps: several devices run them at once.  They share the number ``INFERENCE``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch

from mgpu_core.trace.events import INFERENCE, NO_STEP, Event

__all__ = ["Clock", "Draft", "TraceBuffer", "WholeStep"]


class Clock:
    """Read times on devices that run work after its launch; this one knows none of them, and leaves the host's time."""

    def mark(self, device: torch.device) -> object:
        """Return a mark on the device's current stream; ``None`` to use the host's time."""
        return None

    def ns(self, mark: Any) -> int:
        """Wait for the mark, and return its time in ns of the host's clock."""
        raise NotImplementedError


class WholeStep(NamedTuple):
    """A whole step whose begin was recorded."""

    name: str
    begin_ns: int


Draft: TypeAlias = Callable[[Clock], Event]
_numbers = count(
    NO_STEP + 1
)  # unique in the process, so a late backward of an earlier trace is not taken for one of this


@dataclass(slots=True)
class TraceBuffer:
    """The events of one recording; any thread adds to it.  Read it after its end, when all times are known.

    Args:
        clock: reads the devices' times.
        skip: number of whole steps to ignore first.
        steps: number of whole steps to keep; the recording ends when the next one begins; ``None``: keep all.
        limit: most events to keep, so that a forgotten recording does not fill the memory; later ones are counted.

    Attributes:
        whole_steps: the steps kept, by number, in the order in which they began.
        events: in the order in which they ended; filled by :meth:`finish`.
        dropped: number of events over the limit.
        failure: the error of tracing that ended the recording; it never reaches a training step.
    """

    clock: Clock = field(default_factory=Clock)
    skip: int = 0
    steps: int | None = None
    limit: int = 200_000
    whole_steps: dict[int, WholeStep] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    dropped: int = 0
    failure: Exception | None = None
    _passed: set[int] = field(default_factory=set)  # numbers of steps that are not kept
    _open: set[int] = field(default_factory=set)  # of those that have not ended
    _awaited: set[int] = field(default_factory=set)  # kept steps whose backward is still to come
    _patience: int = 8  # further steps that may begin meanwhile
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _drafts: list[tuple[int, Draft]] = field(default_factory=list)
    _process: int = field(default_factory=os.getpid)

    def is_inside(self, number: int) -> bool:
        """Return True if the step has begun in this recording and has not ended."""
        return number in self._open

    def begin_step(self, name: str, *, has_backward: bool = False) -> int:
        """Return the number of a whole step that begins.

        Args:
            has_backward: its backward comes after its end.
        """
        with self._lock:
            number = next(_numbers)
            self._open.add(number)
            if len(self._passed) < self.skip or self._is_full():
                self._passed.add(number)
            elif not self.dropped:
                self.whole_steps[number] = WholeStep(name, time.perf_counter_ns())
                if has_backward:
                    self._awaited.add(number)
            return number

    def end_step(self, number: int) -> None:
        """Note the end of a whole step; later entries of it are its backward."""
        with self._lock:
            self._open.discard(number)

    def is_over(self) -> bool:
        """Return True when all steps to keep have begun and ended, with their backward; ask when another one begins.

        Several forwards may come before their backward.  It is waited for while some more steps begin.
        """
        with self._lock:
            if not self._is_full() or not self._open.isdisjoint(self.whole_steps):
                return False
            self._patience -= bool(self._awaited)
            return not self._awaited or self._patience < 0

    def _is_full(self) -> bool:
        return self.steps is not None and len(self.whole_steps) >= self.steps

    def add(self, number: int, draft: Draft) -> None:
        """Keep an event whose times are read at the end.

        Args:
            number: of its whole step; ``INFERENCE``: always kept; events of no step are kept once the skipped steps
                are over.
            draft: makes the event from the clock.
        """
        is_known = number == INFERENCE or number in self.whole_steps
        if number in self._passed or (not is_known and self._is_before_the_first()):
            return
        if number in self._awaited and number not in self._open:
            self._awaited.discard(number)
        if len(self._drafts) < self.limit:
            self._drafts.append((number if is_known else NO_STEP, draft))
        else:
            self.dropped += 1

    def _is_before_the_first(self) -> bool:
        return self.skip > 0 and not self.whole_steps

    def forget_threads(self) -> None:
        """Replace the lock in a forked child, in which its holder does not exist."""
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Wait for the devices, and fill ``events``; a forked child keeps none of its parent's."""
        if os.getpid() == self._process:
            self.events = [replace(draft(self.clock), whole_step=number) for number, draft in self._drafts]
        self._drafts.clear()
