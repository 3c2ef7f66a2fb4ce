# Exercise 1 is wrong: what send returns is thrown away, and the other rank's memory is read instead.
# The checker says: number 0 of all ranks, sorted (use what send returns): expected int64 tensor [102, 103], got

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def ring_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    ranks = len(tensors)
    chunks = [tensor.tensor_split(ranks) for tensor in tensors]
    for step in range(2 * (ranks - 1)):
        for rank in range(ranks):
            following, chunk = (rank + 1) % ranks, (rank - step) % ranks
            send(rank, following, chunks[rank][chunk])
            if step < ranks - 1:
                chunks[following][chunk].add_(chunks[rank][chunk])
            else:
                chunks[following][chunk].copy_(chunks[rank][chunk])
