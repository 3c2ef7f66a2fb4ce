"""Lesson 11, a kernel rung by rung: the solution."""

from collections.abc import Sequence


def sectors(addresses: Sequence[int], nbytes: int) -> int:
    """The sectors from the first byte of each load to its last, each once."""
    touched: set[int] = set()
    for address in addresses:
        touched.update(range(address // 32, (address + nbytes - 1) // 32 + 1))
    return len(touched)


def split(address: int, count: int, itemsize: int) -> tuple[int, int, int]:
    """Items up to the next multiple of 16, then whole vectors, then the rest."""
    vector = 16 // itemsize
    head = min(count, -address % 16 // itemsize)
    body = (count - head) // vector * vector
    return head, body, count - head - body


def moved_nbytes(ranks: int, nbytes: int, fused: bool) -> int:
    """n + 1 tensors, or three for each of n - 1 passes."""
    if ranks == 1:
        return 0
    return (ranks + 1 if fused else 3 * (ranks - 1)) * nbytes
