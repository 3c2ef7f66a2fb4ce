# Exercise 1 is wrong: one message per tensor; the sums are right, but there are no buckets.
# The checker says: elements of each call of all_reduce: expected [11, 10], got [10, 1, 4, 6]

from collections.abc import Callable, Sequence

import torch


def reduce_in_buckets(
    gradients: Sequence[Sequence[torch.Tensor]],
    buckets: Sequence[Sequence[int]],
    all_reduce: Callable[[list[torch.Tensor]], None],
) -> None:
    for positions in buckets:
        for i in positions:
            all_reduce([own[i].view(-1) for own in gradients])
