# Exercise 2 is wrong: on the way up each pair answers at once, and the way down writes over that answer.
# The checker says: all ranks together should send 12 numbers, and send 18

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def tree_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    ranks, distance = len(tensors), 1
    edges = []
    while distance < ranks:
        edges += [(low, low + distance) for low in range(0, ranks - distance, 2 * distance)]
        distance *= 2
    for low, high in edges:
        tensors[low].add_(send(high, low, tensors[high]))
        tensors[high].copy_(send(low, high, tensors[low]))
    for low, high in reversed(edges):
        tensors[high].copy_(send(low, high, tensors[low]))
