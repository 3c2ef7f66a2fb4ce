"""Lesson 11, a kernel rung by rung: write the three functions, then run `mgpu lesson check 11`.

Plain Python is all you need.
"""

from collections.abc import Sequence


def sectors(addresses: Sequence[int], nbytes: int) -> int:
    """How many sectors of 32 bytes a warp touches, whose threads load `nbytes` bytes each from these addresses.

    A sector that several threads touch counts once.  A load may begin in one sector and end in another, or beyond.
    """
    raise NotImplementedError


def split(address: int, count: int, itemsize: int) -> tuple[int, int, int]:
    """How many of `count` items lie in the head, the body and the tail of a tensor at `address`.

    The head goes up to the first address that is a multiple of 16, or to the end of the tensor; then come as many whole
    vectors of 16 bytes as there is room for, the body; the tail is the rest.
    `itemsize` is 1, 2, 4, 8 or 16, and `address` a multiple of it.
    """
    raise NotImplementedError


def moved_nbytes(ranks: int, nbytes: int, fused: bool) -> int:
    """The bytes that the sum of `ranks` tensors of `nbytes` each reads and writes, in place of rank 0's tensor.

    Fused: all tensors are read once, and the result is written once.  Otherwise one pass per rank but the first, which
    reads the total and the rank's tensor and writes the total.  One rank alone has nothing to do.
    """
    raise NotImplementedError
