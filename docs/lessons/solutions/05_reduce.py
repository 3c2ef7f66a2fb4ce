"""Lesson 5, reduce: a solution."""

from collections.abc import Callable, Sequence

import torch

Send = Callable[[int, int, torch.Tensor], torch.Tensor]


def ring_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    """Chunk c starts at rank c, collects n - 1 contributions, and travels on n - 1 times."""
    ranks = len(tensors)
    chunks = [tensor.tensor_split(ranks) for tensor in tensors]
    for step in range(2 * (ranks - 1)):
        for rank in range(ranks):
            following, chunk = (rank + 1) % ranks, (rank - step) % ranks
            arrived = send(rank, following, chunks[rank][chunk])
            if step < ranks - 1:
                chunks[following][chunk].add_(arrived)
            else:
                chunks[following][chunk].copy_(arrived)


def tree_all_reduce(tensors: Sequence[torch.Tensor], send: Send) -> None:
    """Who adds whom up, written down on the way up; the way down is the same in reverse."""
    ranks, distance = len(tensors), 1
    edges: list[tuple[int, int]] = []
    while distance < ranks:
        edges += [
            (low, low + distance) for low in range(0, ranks - distance, 2 * distance)
        ]
        distance *= 2
    for low, high in edges:
        tensors[low].add_(send(high, low, tensors[high]))
    for low, high in reversed(edges):
        tensors[high].copy_(send(low, high, tensors[low]))


def nbytes_sent(algorithm: str, ranks: int, nbytes: int) -> list[int]:
    """Every rank but 0 sends once upwards; what it sends down depends on how many listen to it."""
    if algorithm == "ring":
        return [2 * (ranks - 1) * nbytes // ranks] * ranks
    listeners = [ranks - 1] + [0] * (ranks - 1)
    if algorithm == "tree":
        powers = [1 << i for i in range(ranks.bit_length())]
        listeners = [
            sum(rank % (2 * power) == 0 and rank + power < ranks for power in powers)
            for rank in range(ranks)
        ]
    return [(listeners[rank] + (rank > 0)) * nbytes for rank in range(ranks)]
