# Exercise 1 is wrong: the flat sums are made and thrown away; cat has copied the gradients.
# The checker says: the gradients of rank 0: [0]: expected float32 tensor

from collections.abc import Callable, Sequence

import torch


def reduce_in_buckets(
    gradients: Sequence[Sequence[torch.Tensor]],
    buckets: Sequence[Sequence[int]],
    all_reduce: Callable[[list[torch.Tensor]], None],
) -> None:
    for positions in buckets:
        all_reduce([torch.cat([own[i].flatten() for i in positions]) for own in gradients])
