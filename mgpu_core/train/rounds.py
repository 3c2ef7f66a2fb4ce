"""Who is ready with what in one backward: counting alone, apart from what is done when a bucket is complete."""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["Round"]


class Round:
    """Who is ready with what in one backward.  Each rank counts for itself; only whole buckets are counted together."""

    def __init__(self, expected: Sequence[int], ranks: int, buckets: int) -> None:
        self._missing = [list(expected) for _ in range(ranks)] if expected else []
        self._ranks_missing = [ranks] * len(expected)
        self._summed: set[int] = set()
        self._buckets = buckets
        self._lock = threading.Lock()

    def is_complete(self, rank: int, bucket: int) -> bool:
        """Counts a gradient; says whether all gradients of all ranks are there now."""
        if not self._ranks_missing:
            return False
        missing = self._missing[rank]
        missing[bucket] -= 1
        if missing[bucket] > 0:
            return False
        with self._lock:
            if missing[bucket] < 0:  # one more than there are: a checkpoint came twice, and the sum was too early
                self._summed.discard(bucket)
                self._ranks_missing[bucket] = -1
                return False
            self._ranks_missing[bucket] -= 1
            if self._ranks_missing[bucket] != 0:
                return False
            self._summed.add(bucket)
            return True

    def has_all_of(self, rank: int, bucket: int) -> bool:
        """Whether the rank has counted all its gradients of the bucket."""
        return bool(self._ranks_missing) and self._missing[rank][bucket] == 0

    def left(self) -> list[int]:
        """The buckets that are not summed yet, or were too early."""
        return [bucket for bucket in range(self._buckets) if bucket not in self._summed]
