"""Lesson 6, buckets: a solution."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch


def reduce_in_buckets(
    gradients: Sequence[Sequence[torch.Tensor]],
    buckets: Sequence[Sequence[int]],
    all_reduce: Callable[[list[torch.Tensor]], None],
) -> None:
    """Pack, sum, unpack."""
    for positions in buckets:
        flats = [torch.cat([own[i].flatten() for i in positions]) for own in gradients]
        all_reduce(flats)
        for own, flat in zip(gradients, flats, strict=True):
            for i, piece in zip(
                positions, flat.split([own[i].numel() for i in positions]), strict=True
            ):
                own[i].copy_(piece.view_as(own[i]))


def complete_buckets(
    events: Sequence[tuple[int, int]], bucket_of: Mapping[int, int], ranks: int
) -> list[int]:
    """Counts down, for all ranks together."""
    missing = {
        bucket: ranks * count for bucket, count in Counter(bucket_of.values()).items()
    }
    found = []
    for _, parameter in events:
        bucket = bucket_of[parameter]
        missing[bucket] -= 1
        if missing[bucket] == 0:
            found.append(bucket)
    return found


def finish(ready: Sequence[int], nbytes: Sequence[int], latency: int, rate: int) -> int:
    """The later of ready and free, and then the message's own time."""
    free = 0
    for at, each in zip(ready, nbytes, strict=True):
        free = max(free, at) + latency + each // rate
    return free
