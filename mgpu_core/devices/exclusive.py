"""A right that many threads have at once, or one alone; every wait for it is bounded."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, get_ident

from mgpu_core.devices.time_limits import time_limit
from mgpu_core.errors import Error

__all__ = ["Exclusive"]


class Exclusive:
    """Many threads may be inside at once, or one alone: ``with exclusive:`` is alone.

    A thread that is inside may come in again, and is out when it leaves once: so one that Ctrl-C has cut off on its way
    in or out does not keep itself out.

    Args:
        busy: the message of a wait that took too long, up to its seconds: ``another recording did not end``.
    """

    def __init__(self, busy: str) -> None:
        self._busy = busy
        self._changed = Condition()
        self._inside: set[int] = set()  # threads
        self._is_alone = False  # the only one of them

    def enter(self, alone: Callable[[], bool] = lambda: True) -> bool:
        """Wait until this thread may come in; return whether it is alone.

        Args:
            alone: returns whether it has to be, as far as is known then.

        Raises:
            Error: it may not within ``MGPU_CORE_TIMEOUT`` seconds.
        """
        me = get_ident()
        with self._changed:
            if self._inside - {me}:
                seconds = time_limit()
                if not self._changed.wait_for(
                    lambda: not self._inside - {me} or not (self._is_alone or alone()), seconds
                ):
                    raise Error(f"{self._busy} within {seconds:g} s; MGPU_CORE_TIMEOUT sets the limit")
            self._is_alone = alone()
            self._inside.add(me)
            return self._is_alone

    def leave(self) -> None:
        """Let others come in; do nothing if this thread is not inside."""
        with self._changed:
            self._inside.discard(get_ident())
            if not self._inside:
                self._is_alone = False
            self._changed.notify_all()  # one that is inside may wait to be alone

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()
