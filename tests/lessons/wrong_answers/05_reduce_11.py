# Exercise 2 is wrong: the way down goes in the order of the way up, and rank 2 tells rank 3 what it does not know yet.
# The checker says: tree_all_reduce(4 tensors of 6 numbers, send), the tensor of rank 3: expected

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
    for low, high in edges:
        tensors[high].copy_(send(low, high, tensors[low]))
