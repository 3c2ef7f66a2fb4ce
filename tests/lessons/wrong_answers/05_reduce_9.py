# Exercise 1 is wrong: one step too many, in which every chunk comes home to the rank that has it already.
# The checker says: all ranks together should send 48 numbers, and send 72

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def ring_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    ranks = len(tensors)
    if ranks == 1:
        return
    chunks = [tensor.tensor_split(ranks) for tensor in tensors]
    for step in range(2 * ranks - 1):
        for rank in range(ranks):
            following, chunk = (rank + 1) % ranks, (rank - step) % ranks
            arrived = send(rank, following, chunks[rank][chunk])
            if step < ranks - 1:
                chunks[following][chunk].add_(arrived)
            else:
                chunks[following][chunk].copy_(arrived)
