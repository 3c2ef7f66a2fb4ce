# Exercise 1 is wrong: unpacked in the order of the tensors, although packed in the order of the bucket.
# The checker says: the gradients of rank 0: [0]: expected float32 tensor

from collections.abc import Callable, Sequence

import torch


def reduce_in_buckets(
    gradients: Sequence[Sequence[torch.Tensor]],
    buckets: Sequence[Sequence[int]],
    all_reduce: Callable[[list[torch.Tensor]], None],
) -> None:
    for positions in buckets:
        flats = [torch.cat([own[i].flatten() for i in positions]) for own in gradients]
        all_reduce(flats)
        for own, flat in zip(gradients, flats, strict=True):
            begin = 0
            for i in sorted(positions):
                own[i].copy_(flat[begin : begin + own[i].numel()].view_as(own[i]))
                begin += own[i].numel()
