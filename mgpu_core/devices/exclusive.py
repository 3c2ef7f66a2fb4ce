"""A right that many threads have at once, or one alone; every wait for it is bounded.

Each thread that is inside holds a lock of its own, and other threads wait for this lock.  C code releases it, which
Ctrl-C does not interrupt.  An ``__exit__`` in Python can be interrupted before its first line, and its thread would
then stay inside for ever::

    this thread    enter() [holds its lock: with ... works ...] releases it
    another one    enter() [waits for that lock, at most so long .....] looks again, comes in
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, RLock, get_ident
from typing import Any

from mgpu_core.devices.time_limits import time_limit
from mgpu_core.errors import Error

__all__ = ["Exclusive"]

_RLock: Any = type(RLock())  # a class of C, without a public name


class _Stay(_RLock):  # type: ignore[misc]
    """A thread's stay inside: a lock that it holds until it leaves the ``with`` block."""

    __enter__ = _RLock._is_owned  # it is held already: a function of C that does nothing

    def __init__(self) -> None:
        self.thread, self.is_alone = get_ident(), False

    def is_over(self, seconds: float = 0.0) -> bool:
        """Wait so long for its end, in another thread; return whether it has come."""
        try:
            return bool(self.acquire(timeout=seconds))
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Release it if this thread holds it: asked of the lock, since Ctrl-C may have cut off who would know."""
        while self._is_owned():
            self.release()


class Exclusive:
    """Many threads may be inside at once, or one alone: ``with exclusive.enter():`` is alone.

    A thread that is inside may come in again.

    Args:
        busy: the message of a wait that took too long, up to its seconds: ``another recording did not end``.

    Attributes:
        is_alone: whether the last thread that came in is alone.
    """

    def __init__(self, busy: str) -> None:
        self._busy = busy
        self._lock = Lock()
        self._stays: list[_Stay] = []
        self.is_alone = False

    def enter(self, alone: Callable[[], bool] = lambda: True) -> _Stay:
        """Wait until this thread may come in; return its stay, for ``with``.

        Args:
            alone: returns whether it has to be, as far as is known then.

        Raises:
            Error: it may not within ``MGPU_CORE_TIMEOUT`` seconds.
        """
        stay = _Stay()
        try:
            self._wait_for(stay, alone)
            return stay
        except BaseException:
            stay.let_go()
            raise

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let others come in while this thread, which is inside, waits for them.

        Raises:
            Error: it may not come in again within ``MGPU_CORE_TIMEOUT`` seconds.
        """
        stays = [each for each in self._stays if each._is_owned()]
        for stay in stays:
            stay.let_go()
        try:
            yield
        finally:
            try:
                for stay in stays:
                    self._wait_for(stay, partial(getattr, stay, "is_alone"))
            finally:
                for stay in stays:  # their blocks end in any case
                    if not stay._is_owned():
                        stay.acquire()

    def _wait_for(self, stay: _Stay, alone: Callable[[], bool]) -> None:
        seconds, began = 0.0, 0.0
        while (other := self._begin(stay, alone)) is not None:
            if not began:
                seconds, began = time_limit(), time.monotonic()
            if not other.is_over(max(began + seconds - time.monotonic(), 0.0)):
                raise Error(f"{self._busy} within {seconds:g} s; MGPU_CORE_TIMEOUT sets the limit")

    def _begin(self, stay: _Stay, alone: Callable[[], bool]) -> _Stay | None:
        """Begin a stay, or return one that has to end before."""
        with self._lock:
            others = [each for each in self._stays if each.thread != stay.thread and not each.is_over()]
            outer = [each for each in self._stays if each._is_owned()]
            is_alone = alone() or any(each.is_alone for each in outer)
            before = others if is_alone else [each for each in others if each.is_alone]
            if before:
                return before[0]
            self._stays, self.is_alone, stay.is_alone = [*others, *outer, stay], is_alone, is_alone
            stay.acquire()
            return None
