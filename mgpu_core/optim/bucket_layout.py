"""Where each parameter lies in the flat buckets: integers in, integers out.

Parameters of one dtype lie one after the other, each at a multiple of 512 bytes, so that every kernel finds its
alignment.  A bucket is reduced in one message and updated by one kernel; buckets follow the order in which
gradients become ready, so that the first ones travel while backward goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_core import _core

__all__ = ["ALIGN_NBYTES", "Bucket", "Segment", "bucket_layout", "bucket_of", "shard_of"]

ALIGN_NBYTES = 512


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter in its bucket: ``count`` elements from ``begin`` on.

    In a shard it may be a part of the parameter: ``offset`` elements of it lie in the shards before.
    """

    parameter: int
    begin: int
    count: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """``count`` elements, padding included; its segments in order."""

    count: int
    segments: tuple[Segment, ...]


def bucket_layout(
    counts: Sequence[int],
    itemsizes: Sequence[int],
    kinds: Sequence[int],
    order: Sequence[int],
    limit_nbytes: int,
    shards: int = 1,
) -> tuple[Bucket, ...]:
    """Return the buckets of the parameters named in ``order``, in that order.

    Args:
        counts, itemsizes, kinds: per parameter its elements, their bytes, and a number for its dtype; one bucket holds
            one kind.
        order: indices of parameters, each at most once.
        limit_nbytes: a bucket is closed when it would grow beyond; a larger parameter has one for itself.
        shards: how many equal parts each bucket must have.

    Raises:
        ValueError: a limit that is not positive.
    """
    nbytes = [counts[i] * itemsizes[i] for i in order]
    groups = _core.bucket_plan(nbytes, [kinds[i] for i in order], limit_nbytes)
    return tuple(bucket_of([order[position] for position in group], counts, itemsizes, shards) for group in groups)


def bucket_of(parameters: Sequence[int], counts: Sequence[int], itemsizes: Sequence[int], shards: int) -> Bucket:
    """Return one bucket of these parameters, which are of one kind; arguments as for :func:`bucket_layout`."""
    segments, end = [], 0
    align = ALIGN_NBYTES // itemsizes[parameters[0]]
    for i in parameters:
        segments.append(Segment(i, end, counts[i]))
        end = _up(end + counts[i], align)
    return Bucket(_up(max(end, 1), align * shards), tuple(segments))  # never empty: a GPU launches nothing for that


def _up(count: int, align: int) -> int:
    return -(-count // align) * align


def shard_of(bucket: Bucket, index: int, shards: int) -> Bucket:
    """Return shard ``index`` of a bucket that was laid out for so many shards; its begins count from its own first."""
    count = bucket.count // shards
    low, high = index * count, (index + 1) * count
    ends = [(each, max(each.begin, low), min(each.begin + each.count, high)) for each in bucket.segments]
    segments = [Segment(each.parameter, a - low, b - a, a - each.begin) for each, a, b in ends if a < b]
    if index == 0:  # a parameter without elements is counted by the first shard
        empty = [Segment(each.parameter, min(each.begin, count), 0) for each in bucket.segments if not each.count]
        segments = sorted([*segments, *empty], key=lambda segment: (segment.begin, segment.count))
    return Bucket(count, tuple(segments))
