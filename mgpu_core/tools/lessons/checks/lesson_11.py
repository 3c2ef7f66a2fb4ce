"""Lesson 11, a kernel rung by rung."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from mgpu_core.tools.lessons.answers import asks_for, expect

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_SECTOR, _VECTOR = 32, 16


def _sectors(addresses: list[int], nbytes: int) -> int:
    return len({byte // _SECTOR for address in addresses for byte in range(address, address + nbytes)})


@asks_for("sectors")
def exercise_1(answer: Callable[[list[int], int], Any]) -> None:
    """Check: load across borders, far apart, and several on one sector."""
    warps = [
        ([0], 4),
        ([28], 16),
        ([28], 5),
        ([0, 4, 8, 12], 4),
        ([31, 31, 31], 1),
        ([0, 32, 64], 32),
        ([4 * thread for thread in range(32)], 4),
        ([512 * thread for thread in range(32)], 4),
        ([4 + 16 * thread for thread in range(32)], 16),
        ([96, 0, 96, 64], 8),
        ([5], 100),
    ]
    for addresses, nbytes in warps:
        expect(f"sectors({addresses}, {nbytes})", answer(list(addresses), nbytes), _sectors(addresses, nbytes))


@asks_for("split")
def exercise_2(answer: Callable[[int, int, int], Any]) -> None:
    """Check: every item size, at every address that it may have, from nothing to many."""
    counts = (0, 1, 2, 3, 5, 16, 17, 100)
    every = ((address, count, size) for size in (4, 1, 2, 8, 16) for address in range(0, 48, size) for count in counts)
    for asked in ((8, 100, 4), (4, 2, 4), (0, 3, 4), *every):
        expect(f"split{asked}", answer(*asked), _split(*asked))


def _split(address: int, count: int, itemsize: int) -> tuple[int, int, int]:
    """Item by item: the body begins at the first multiple of 16, and ends with the last whole vector."""
    elements = [address + i * itemsize for i in range(count)]
    head = next((i for i, element in enumerate(elements) if element % _VECTOR == 0), count)
    vectors = (count - head) * itemsize // _VECTOR
    body = vectors * _VECTOR // itemsize
    return head, body, count - head - body


@asks_for("moved_nbytes")
def exercise_3(answer: Callable[[int, int, bool], Any]) -> None:
    """Check: counted tensor by tensor."""
    for asked in itertools.product((1, 2, 3, 8), (8, 1000), (False, True)):
        expect(f"moved_nbytes{asked}", answer(*asked), _moved(*asked))


def _moved(ranks: int, nbytes: int, fused: bool) -> int:
    if ranks == 1:
        return 0
    reads_and_writes = [1] * ranks + [1] if fused else [3] * (ranks - 1)
    return sum(reads_and_writes) * nbytes
