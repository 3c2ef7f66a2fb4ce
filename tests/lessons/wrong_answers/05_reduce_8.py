# Exercise 1 is wrong: the ring runs backwards; the sums and the bytes are right, and every link is used the other way.
# The checker says: ring_all_reduce(3 tensors of 24 numbers, send): rank 0 sends to rank 2, which is not the next one

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def ring_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    ranks = len(tensors)
    chunks = [tensor.tensor_split(ranks) for tensor in tensors]
    for step in range(2 * (ranks - 1)):
        for rank in range(ranks):
            following, chunk = (rank - 1) % ranks, (rank + step) % ranks
            arrived = send(rank, following, chunks[rank][chunk])
            if step < ranks - 1:
                chunks[following][chunk].add_(arrived)
            else:
                chunks[following][chunk].copy_(arrived)
