"""Where each parameter lies in the flat buckets: integers in, integers out.

Parameters of one dtype lie one behind the other, each at a multiple of 512 bytes, so that every kernel finds its
alignment.  A bucket is what is reduced in one message and updated by one kernel; buckets follow the order in which
gradients become ready, so that the first ones travel while backward goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_core import _core

__all__ = ["ALIGN_NBYTES", "Bucket", "Segment", "bucket_layout"]

ALIGN_NBYTES = 512


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter in its bucket: ``count`` elements from ``begin`` on."""

    parameter: int
    begin: int
    count: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """``count`` elements, padding included; its segments in order."""

    count: int
    segments: tuple[Segment, ...]


def bucket_layout(
    counts: Sequence[int], itemsizes: Sequence[int], kinds: Sequence[int], order: Sequence[int], limit_nbytes: int
) -> tuple[Bucket, ...]:
    """The buckets of the parameters named in ``order``, in that order.

    Args:
        counts, itemsizes, kinds: per parameter its elements, their bytes, and a number for its dtype; one bucket holds
            one kind.
        order: places of parameters, each at most once.
        limit_nbytes: a bucket is closed when it would grow beyond; a larger parameter has one for itself.

    Raises:
        ValueError: a limit that is not positive.
    """
    nbytes = [counts[i] * itemsizes[i] for i in order]
    groups = _core.bucket_plan(nbytes, [kinds[i] for i in order], limit_nbytes)
    return tuple(_bucket([order[place] for place in group], counts, itemsizes) for group in groups)


def _bucket(parameters: Sequence[int], counts: Sequence[int], itemsizes: Sequence[int]) -> Bucket:
    segments, end = [], 0
    for i in parameters:
        segments.append(Segment(i, end, counts[i]))
        align = ALIGN_NBYTES // itemsizes[i]
        end += -(-counts[i] // align) * align
    return Bucket(end, tuple(segments))
