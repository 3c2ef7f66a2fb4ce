# Exercise 2 is wrong: on the way down the root's tensor is copied, and not what comes over the wire.
# The checker says: number 0 of all ranks, sorted (use what send returns): expected int64 tensor [102, 103], got

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def tree_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    ranks, distance = len(tensors), 1
    edges: list[tuple[int, int]] = []
    while distance < ranks:
        edges += [(low, low + distance) for low in range(0, ranks - distance, 2 * distance)]
        distance *= 2
    for low, high in edges:
        tensors[low].add_(send(high, low, tensors[high]))
    for low, high in reversed(edges):
        send(low, high, tensors[low])
        tensors[high].copy_(tensors[0])
