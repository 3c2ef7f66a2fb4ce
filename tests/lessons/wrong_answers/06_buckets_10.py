# Exercise 1 is wrong: all_reduce gets the right tensors, but the sums are made without it.
# The checker says: all_reduce), whose all_reduce adds 0.5 to every sum, the gradients of rank 0: [0]: expected

from collections.abc import Callable, Sequence

import torch


def reduce_in_buckets(
    gradients: Sequence[Sequence[torch.Tensor]],
    buckets: Sequence[Sequence[int]],
    all_reduce: Callable[[list[torch.Tensor]], None],
) -> None:
    for positions in buckets:
        all_reduce([torch.cat([own[i].flatten() for i in positions]) for own in gradients])
    for same in zip(*gradients, strict=True):
        total = torch.stack(same).sum(dim=0)
        for gradient in same:
            gradient.copy_(total)
