"""Ranks that are ahead of others wait for them, so that results which need all ranks do not pile up."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

__all__ = ["Pace"]


_SECONDS = 5.0


class Pace:
    """The ranks of one call that are at work.  Nothing depends on the waits but memory: each ends without hope.

    Args:
        ranks: how many work at once, in threads of their own; 0: none waits.

    Attributes:
        was_in_vain: a wait took too long: gradients of one rank, say, are made in the thread of another.
    """

    def __init__(self, ranks: int) -> None:
        self._at_work = set(range(ranks))
        self._waiting: dict[int, Callable[[], bool]] = {}  # until these are done
        self._changed, self.was_in_vain = Condition(), False

    def wait(self, rank: int, is_done: Callable[[], bool]) -> None:
        """Wait for the others, as long as one of them is at work and does not wait itself."""
        with self._changed:
            self._waiting[rank] = is_done
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: is_done() or self._all_wait(), _SECONDS):
                self.was_in_vain = True
                self._at_work.clear()
                self._changed.notify_all()
            self._waiting.pop(rank, None)

    def _all_wait(self) -> bool:
        """Return whether no rank is at work that could do something; one that is yet to wake up could."""
        return all(rank in self._waiting and not self._waiting[rank]() for rank in self._at_work)

    def went_on(self) -> None:
        """Let those who wait look again."""
        if self._at_work:
            with self._changed:
                self._changed.notify_all()

    def end(self, rank: int) -> None:
        """Note that a rank is through, or has failed."""
        with self._changed:
            self._at_work.discard(rank)
            self._changed.notify_all()
