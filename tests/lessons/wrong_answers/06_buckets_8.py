# Exercise 1 is wrong: every rank calls for itself, as in a process of its own; a sum of one tensor is that tensor.
# The checker says: all_reduce wants one flat tensor per rank, of equal length, and got [(11,)]

from collections.abc import Callable, Sequence

import torch


def reduce_in_buckets(
    gradients: Sequence[Sequence[torch.Tensor]],
    buckets: Sequence[Sequence[int]],
    all_reduce: Callable[[list[torch.Tensor]], None],
) -> None:
    for positions in buckets:
        for own in gradients:
            flat = torch.cat([own[i].flatten() for i in positions])
            all_reduce([flat])
            for i, piece in zip(positions, flat.split([own[i].numel() for i in positions]), strict=True):
                own[i].copy_(piece.view_as(own[i]))
