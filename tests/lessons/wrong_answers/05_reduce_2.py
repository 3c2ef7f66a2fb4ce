# Exercise 1 is wrong: the sums are right, but whole tensors go round the ring: n times the bytes.
# The checker says: a message has 24 numbers, and the largest chunk has 12

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def ring_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    ranks = len(tensors)
    travelling = [tensor.clone() for tensor in tensors]
    for _ in range(ranks - 1):
        travelling = [send((rank - 1) % ranks, rank, travelling[rank - 1]) for rank in range(ranks)]
        for tensor, arrived in zip(tensors, travelling, strict=True):
            tensor.add_(arrived)
