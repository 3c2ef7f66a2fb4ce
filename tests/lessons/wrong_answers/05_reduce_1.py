# Exercise 1 is wrong: the second half is missing, so every rank has one complete chunk and parts of the others.
# The checker says: ring_all_reduce(2 tensors of 24 numbers, send), the tensor of rank 0: expected

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def ring_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    ranks = len(tensors)
    chunks = [tensor.tensor_split(ranks) for tensor in tensors]
    for step in range(ranks - 1):
        for rank in range(ranks):
            following, chunk = (rank + 1) % ranks, (rank - step) % ranks
            chunks[following][chunk].add_(send(rank, following, chunks[rank][chunk]))
