# Exercise 2 is wrong: everything goes through rank 0; the sums and the total are right, but it is no tree.
# The checker says: rank 0 receives 3 messages, and in a tree no rank receives more than 2

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def tree_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    for rank in range(1, len(tensors)):
        tensors[0].add_(send(rank, 0, tensors[rank]))
    for rank in range(1, len(tensors)):
        tensors[rank].copy_(send(0, rank, tensors[0]))
