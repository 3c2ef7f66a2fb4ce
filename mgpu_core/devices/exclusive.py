"""A right that many threads have at once, or one alone; every wait for it is bounded."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, get_ident

from mgpu_core.devices.time_limits import time_limit
from mgpu_core.errors import Error

__all__ = ["Exclusive"]


class Exclusive:
    """Many threads may be inside at once, or one alone: ``with exclusive:`` is alone.

    Args:
        busy: the message of a wait that took too long, up to its seconds: ``another recording did not end``.
        again: a thread that is alone inside may come in once more; without, that is an error at once.
    """

    def __init__(self, busy: str, *, again: bool = False) -> None:
        self._busy, self._again = busy, again
        self._changed = Condition()
        self._inside = 0
        self._alone: int | None = None  # the thread that is alone inside

    def enter(self, alone: Callable[[], bool] = lambda: True) -> bool:
        """Wait until this thread may come in; return whether it is alone.

        Args:
            alone: returns whether it has to be, as far as is known then.

        Raises:
            Error: it may not within ``MGPU_CORE_TIMEOUT`` seconds.
        """
        me = get_ident()
        with self._changed:
            is_in = self._alone == me
            if is_in and not self._again:
                raise Error(f"{self._busy}: it waits for this call, which is inside it")
            if self._inside and not is_in:
                seconds = time_limit()
                if not self._changed.wait_for(lambda: self._alone is None and not (self._inside and alone()), seconds):
                    raise Error(f"{self._busy} within {seconds:g} s; MGPU_CORE_TIMEOUT sets the limit")
            self._inside += 1
            self._alone = me if is_in or alone() else None
            return self._alone is not None

    def leave(self) -> None:
        """Let others come in; the thread may be another one than that which came."""
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._alone = None
                self._changed.notify_all()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()
