"""The requests that wait: bounded, joined by key, taken by whichever device is free."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable

from mgpu_core.inference.requests import Request

__all__ = ["RequestQueue"]


class RequestQueue:
    """Requests in the order in which they came, per key.

    ::

        caller   put ── waits while full                     worker   take ── waits for a request, and then until
                                                                      there are max_batch rows or max_wait is over

    Args:
        max_pending: how many may wait.
        max_wait: seconds that the oldest request of a batch waits for others.
    """

    def __init__(self, max_pending: int, max_wait: float) -> None:
        self._max_pending, self._max_wait = max_pending, max_wait
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Hashable, deque[Request]] = OrderedDict()
        self._count = 0
        self._is_closed = False

    def put(self, request: Request, timeout: float | None = None) -> None:
        """Add a request; wait for a free slot.

        Raises:
            TimeoutError: there was none in that time.
            RuntimeError: the queue is closed.
        """
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._is_closed or self._count < self._max_pending, timeout)
            if self._is_closed:
                raise RuntimeError("the predictor is closed")
            if not in_time:
                raise TimeoutError(f"{self._max_pending} requests were pending for {timeout:g} s")
            self._waiting.setdefault(request.key, deque()).append(request)
            self._count += 1
            self._changed.notify_all()

    def put_back(self, requests: Iterable[Request]) -> None:
        """Add requests of one key that were taken before, in front of all others and beyond the bound."""
        with self._changed:
            for request in reversed(list(requests)):
                self._waiting.setdefault(request.key, deque()).appendleft(request)
                self._waiting.move_to_end(request.key, last=False)
                self._count += 1
            self._changed.notify_all()

    def take(self, most_rows: int, *, wait: bool = True) -> list[Request]:
        """Return requests of one key with at most ``most_rows`` rows together, or one larger request.

        Returns:
            Nothing if the queue is closed and empty, or empty and ``wait`` is False.
        """
        with self._changed:
            while True:
                if not self._waiting:
                    if self._is_closed or not wait:
                        return []
                    self._changed.wait()
                    continue
                key, requests = next(iter(self._waiting.items()))
                left = requests[0].begin + self._max_wait - time.perf_counter()
                if left <= 0 or self._is_closed or sum(each.rows for each in requests) >= most_rows:
                    return self._taken(key, most_rows)
                full = next((k for k, them in self._waiting.items() if sum(r.rows for r in them) >= most_rows), None)
                if full is not None:
                    return self._taken(full, most_rows)
                self._changed.wait(left)

    def _taken(self, key: Hashable, most_rows: int) -> list[Request]:
        requests, rows = self._waiting[key], 0
        taken: list[Request] = []
        while requests and (not taken or rows + requests[0].rows <= most_rows):
            taken.append(requests.popleft())
            rows += taken[-1].rows
        if not requests:
            del self._waiting[key]
        self._count -= len(taken)
        self._changed.notify_all()
        return taken

    def close(self) -> None:
        """Take no further requests; those that wait can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def drained(self) -> list[Request]:
        """Remove and return all requests that wait."""
        with self._changed:
            found = [each for requests in self._waiting.values() for each in requests]
            self._waiting.clear()
            self._count = 0
            self._changed.notify_all()
            return found
