"""The requests that wait: bounded, joined by key, taken by whichever device is free."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable

from mgpu_core.inference.requests import Request

__all__ = ["RequestQueue"]


class RequestQueue:
    """Requests in the order in which they came, per key.

    ::

        caller   put ── waits while full                     worker   take ── waits for a request, and then until
                                                                      the batch is full or max_wait is over

    A request wakes a worker when it is the first of its key, whose wait is to be timed, or when it fills a batch.

    Args:
        max_pending: how many may wait.
        max_wait: seconds that the oldest request of a batch waits for others.
        max_batch: rows of a full batch.
    """

    def __init__(self, max_pending: int, max_wait: float, max_batch: int) -> None:
        self._max_pending, self._max_wait, self._max_batch = max_pending, max_wait, max_batch
        lock = threading.Lock()
        self._free, self._ready = threading.Condition(lock), threading.Condition(lock)  # for callers, for workers
        self._waiting: OrderedDict[Hashable, deque[Request]] = OrderedDict()
        self._rows: dict[Hashable, int] = {}  # that wait, per key
        self._count = 0
        self._is_closed = False

    def put(self, request: Request, timeout: float | None = None) -> None:
        """Add a request; wait for a free slot.

        Raises:
            TimeoutError: there was none in that time.
            RuntimeError: the queue is closed.
        """
        with self._free:
            if self._count >= self._max_pending and not self._free.wait_for(
                lambda: self._is_closed or self._count < self._max_pending, timeout
            ):
                raise TimeoutError(f"{self._max_pending} requests were pending for {timeout:g} s")
            if self._is_closed:
                raise RuntimeError("the predictor is closed")
            self._waiting.setdefault(request.key, deque()).append(request)
            before = self._rows.get(request.key, 0)
            self._rows[request.key] = before + request.rows
            self._count += 1
            if not before or before < self._max_batch <= before + request.rows:
                self._ready.notify()

    def put_back(self, requests: Iterable[Request]) -> None:
        """Add requests of one key that were taken before, in front of all others and beyond the bound."""
        with self._ready:
            for request in reversed(list(requests)):
                self._waiting.setdefault(request.key, deque()).appendleft(request)
                self._waiting.move_to_end(request.key, last=False)
                self._rows[request.key] = self._rows.get(request.key, 0) + request.rows
                self._count += 1
            self._ready.notify_all()

    def take(self, limit: Callable[[], int], *, wait: bool = True) -> list[Request]:
        """Return requests of one key with at most so many rows together, or one larger request.

        Args:
            limit: returns the number of rows; it may be another after the wait.
            wait: for a batch to be full, or its time to be over.

        Returns:
            Nothing if the queue is closed and empty, or no batch is ready and ``wait`` is False.
        """
        with self._ready:
            while True:
                if not self._waiting:
                    if self._is_closed or not wait:
                        return []
                    self._ready.wait()
                    continue
                most_rows = limit()
                key, requests = next(iter(self._waiting.items()))
                left = requests[0].begin + self._max_wait - time.perf_counter()
                if left > 0 and not self._is_closed and self._rows[key] < most_rows:
                    full = next((each for each, rows in self._rows.items() if rows >= most_rows), None)
                    if full is None:
                        if not wait:
                            return []
                        self._ready.wait(left)
                        continue
                    key = full
                return self._taken(key, most_rows)

    def _taken(self, key: Hashable, most_rows: int) -> list[Request]:
        requests, rows = self._waiting[key], 0
        taken: list[Request] = []
        while requests and (not taken or rows + requests[0].rows <= most_rows):
            taken.append(requests.popleft())
            rows += taken[-1].rows
        self._rows[key] -= rows
        if not requests:
            del self._waiting[key], self._rows[key]
        self._count -= len(taken)
        self._free.notify(len(taken))
        if self._waiting:  # another worker takes the rest
            self._ready.notify()
        return taken

    def close(self) -> None:
        """Take no further requests; those that wait can still be taken."""
        with self._ready:
            self._is_closed = True
            self._free.notify_all()
            self._ready.notify_all()

    def drained(self) -> list[Request]:
        """Remove and return all requests that wait."""
        with self._ready:
            waiting = [each for requests in self._waiting.values() for each in requests]
            self._waiting.clear()
            self._rows.clear()
            self._count = 0
            self._free.notify_all()
            return waiting
