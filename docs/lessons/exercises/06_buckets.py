"""Lesson 6, buckets: write the three functions, then run `mgpu lesson check 6`.

Plain torch is all you need.
"""

from collections.abc import Callable, Mapping, Sequence

import torch


def reduce_in_buckets(
    gradients: Sequence[Sequence[torch.Tensor]],
    buckets: Sequence[Sequence[int]],
    all_reduce: Callable[[list[torch.Tensor]], None],
) -> None:
    """Sums gradients[rank][i] over the ranks, in place: afterwards every rank holds the sums in the same tensors.

    Each bucket is a list of positions i, and travels by exactly one call of `all_reduce`, in the order of the buckets.
    It takes one flat tensor per rank, and puts their sum into all of them.
    """
    raise NotImplementedError


def complete_buckets(
    events: Sequence[tuple[int, int]], bucket_of: Mapping[int, int], ranks: int
) -> list[int]:
    """The buckets, in the order in which they become complete.

    An event (rank, parameter) says that the rank has the gradient of that parameter; each comes at most once.
    `bucket_of` has the bucket of every parameter.  A bucket is complete when all ranks have all its gradients; one that
    never is, is not in the answer.
    """
    raise NotImplementedError


def finish(ready: Sequence[int], nbytes: Sequence[int], latency: int, rate: int) -> int:
    """When the last message has arrived, in microseconds; 0 without messages.

    Message i is sent when it is ready, at ready[i], and the wire is free: it carries one at a time, in the order of the
    list.  A message occupies the wire for `latency`, and a microsecond more for each `rate` bytes; its bytes are a
    multiple of the rate.
    """
    raise NotImplementedError
