"""Lesson 2, replicate: write the three functions, then run `mgpu lesson check 2`.

Plain torch is all you need.
"""

from collections.abc import Sequence

import torch


def bucket_positions(
    nbytes: Sequence[int], kinds: Sequence[int], limit: int
) -> list[list[int]]:
    """The positions of the tensors of each bucket, in order.

    Neighbours share a bucket while their bytes together are at most `limit` and their kinds are equal.  A tensor larger
    than the limit has a bucket for itself.
    """
    raise NotImplementedError


def differentiable_copies(tensor: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    """One copy of the tensor per rank, each in memory of its own.

    Gradients of the copies are added up into the tensor's.  Copies that were not used add nothing.
    """
    raise NotImplementedError


def refresh(replicas: Sequence[torch.nn.Module], net: torch.nn.Module) -> None:
    """Gives all replicas, which are deep copies of the net, the values that its parameters and buffers have now.

    In place: whoever holds a tensor of a replica sees the new values, and every replica keeps memory of its own.
    """
    raise NotImplementedError
