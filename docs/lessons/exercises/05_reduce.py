"""Lesson 5, reduce: write the three functions, then run `mgpu lesson check 5`.

`send(source, target, tensor)` carries a tensor from rank `source` to rank `target`, and returns what arrives there: a
copy.  It is the only way to another rank's numbers.
"""

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def ring_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    """Adds up tensors[rank] over all ranks, in place: afterwards all hold the sum.

    The tensors have one dimension.  They are cut into as many chunks as there are ranks, sizes differ by at most one,
    and a chunk may be empty.  Every message is one chunk, and goes from a rank to the next one.
    """
    raise NotImplementedError


def tree_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    """The same by a tree: in round i, ranks at a distance of 2 to the i add up; then the same way back.

    The sum of two ranks goes to the lower one, so rank 0 is the first that has all of it.  Every message is a whole
    tensor.  The number of ranks need not be a power of two.
    """
    raise NotImplementedError


def nbytes_sent(algorithm: str, ranks: int, nbytes: int) -> list[int]:
    """Bytes that each rank sends in an all-reduce of tensors of `nbytes` bytes, as the functions of the lesson do it.

    The algorithm is "naive", "tree" or "ring"; for a ring, `nbytes` is a multiple of the number of ranks.
    """
    raise NotImplementedError
