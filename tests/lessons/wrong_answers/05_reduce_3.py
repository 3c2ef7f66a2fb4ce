# Exercise 1 is wrong: chunks of count // ranks; what is left over at the end is never sent.
# The checker says: [101, 103, 105, 107, 109], got int64 tensor [101, 103, 105, 107, 5]

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def ring_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    ranks = len(tensors)
    size = len(tensors[0]) // ranks
    chunks = [[tensor[i * size : (i + 1) * size] for i in range(ranks)] for tensor in tensors]
    for step in range(2 * (ranks - 1)):
        for rank in range(ranks):
            following, chunk = (rank + 1) % ranks, (rank - step) % ranks
            arrived = send(rank, following, chunks[rank][chunk])
            if step < ranks - 1:
                chunks[following][chunk].add_(arrived)
            else:
                chunks[following][chunk].copy_(arrived)
