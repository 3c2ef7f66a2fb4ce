"""The memory traffic of an all-reduce of CPU ranks: its loops in order, and the bytes that each moves.

Counted from the core as it is: `csrc/core/peer_collectives.cpp` has the loops, `csrc/backends/cpu/device_ops.cpp` the
sizes up to which one core works alone.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALGORITHMS_ON_HOST", "Pass", "host_passes"]

ALGORITHMS_ON_HOST = ("naive", "direct", "ring", "tree")
_SERIAL_SUM_COUNT = 512 * 1024
_SERIAL_COPY_NBYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pass:
    """One loop of the core: ``nbytes`` of results, ``traffic_nbytes`` read and written; a sum or a copy."""

    nbytes: float
    traffic_nbytes: float
    sums: bool

    def is_serial(self, itemsize: int = 4) -> bool:
        """Return whether one core does all of it; ``itemsize`` is that of an element."""
        return self.nbytes <= (_SERIAL_SUM_COUNT * itemsize if self.sums else _SERIAL_COPY_NBYTES)


def host_passes(algorithm: str, ranks: int, nbytes: float) -> list[Pass]:
    """Return the loops of an all-reduce in place of ``nbytes`` bytes a rank, and the bytes that each moves.

    A sum in place reads its inputs and writes results that it has just read; a copy moves three bytes for one, because
    a cache line is read before it is overwritten.  With n ranks of S bytes: ``direct`` reads n S and writes n S;
    ``naive`` (n + 1) S, then n - 1 copies; ``ring`` 2 (n - 1) rounds over S in all; ``tree`` n - 1 hops of S each way.

    Raises:
        ValueError: an algorithm that the host has not.
    """
    if algorithm in ("auto", "direct"):
        return [Pass(nbytes, 2 * ranks * nbytes, True)]
    if algorithm not in ALGORITHMS_ON_HOST:
        raise ValueError(f"the host has no {algorithm}: wanted one of {', '.join(ALGORITHMS_ON_HOST)}")
    if algorithm == "naive":
        copies = (ranks - 1) * nbytes
        return [Pass(nbytes, (ranks + 1) * nbytes, True), Pass(copies, 3 * copies, False)]
    rounds = [nbytes] * (ranks - 1) if algorithm == "ring" else [hops * nbytes for hops in _tree_hops(ranks)]
    return [Pass(each, 3 * each, sums) for sums in (True, False) for each in rounds]


def _tree_hops(ranks: int) -> list[int]:
    """Return how many hops each round of the binomial tree has, on its way up."""
    distances = [1 << i for i in range((ranks - 1).bit_length())]
    return [len(range(0, ranks - distance, 2 * distance)) for distance in distances]
