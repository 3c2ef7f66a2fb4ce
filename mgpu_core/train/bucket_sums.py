"""Buckets that are laid out on all devices, and their sums: over the ranks of a device, then over the devices."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

import torch

from mgpu_core.comm import dispatch
from mgpu_core.comm.facts import tell_contents
from mgpu_core.comm.rank_sums import RankSums
from mgpu_core.entries import ALL_RANKS
from mgpu_core.optim.bucket_layout import Bucket
from mgpu_core.optim.flat_buffers import FlatTensors
from mgpu_core.record import is_on, span
from mgpu_core.train.between_devices import BetweenDevices
from mgpu_core.train.replicas import Replicas

__all__ = ["BucketSums"]

_gradient = attrgetter("grad")
_Plan: TypeAlias = tuple[RankSums, list[list[torch.nn.Parameter]]]  # of a device: the parameters of each of its ranks


class BucketSums:
    """The sums of each bucket, in the memory that they always lie in.

    Args:
        replicas: whose parameters' gradients are summed.
        buckets: which parameters lie where.
        flats: per device where the sums go.
        between: how they are summed over the devices.
    """

    def __init__(
        self,
        replicas: Replicas,
        buckets: Sequence[Bucket],
        flats: Sequence[FlatTensors],
        between: BetweenDevices,
    ) -> None:
        self._replicas, self._buckets, self._flats, self._between = replicas, buckets, flats, between
        self._plans = [self._plan(bucket) for bucket in buckets]  # per bucket, per device

    def _plan(self, bucket: Bucket) -> list[_Plan]:
        places = [each.parameter for each in bucket.segments]
        rows = self._replicas.parameters
        return [
            (
                RankSums([flat.gradient_views[i] for i in places], ranks),
                [[rows[rank][i] for i in places] for rank in ranks],
            )
            for ranks, flat in zip(self._replicas.ranks_of, self._flats, strict=True)
        ]

    def names(self, bucket: int) -> list[str]:
        """The parameters of a bucket."""
        return [self._replicas.names[each.parameter] for each in self._buckets[bucket].segments]

    def tell(self, bucket: int) -> None:
        """Says to a recording what the bucket holds."""
        if is_on():
            views = self._flats[0].gradient_views
            places = [each.parameter for each in self._buckets[bucket].segments]
            tell_contents("all_reduce", bucket, [(self._replicas.names[i], views[i]) for i in places])

    def add_up_ranks(self, bucket: int, place: int) -> None:
        """Sums a bucket over the ranks of one device, on its current stream."""
        sums, columns = self._plans[bucket][place]
        sums.add_up([list(map(_gradient, column)) for column in columns])

    def add_up_devices(self, bucket: int) -> None:
        """Sums a bucket, which holds the sums over the ranks of each device, over the devices."""
        tensors = [flat.gradients[bucket] for flat in self._flats]
        self._between.add_up(bucket, tensors, lambda: self.names(bucket), bucket == len(self._buckets) - 1)

    def add_up_all_ranks(self, place: int) -> None:
        """All buckets over the ranks of one device."""
        for bucket in range(len(self._buckets)):
            self.add_up_ranks(bucket, place)

    def add_up_all_devices(self) -> None:
        """All buckets over the devices."""
        for bucket in range(len(self._buckets)):
            with span("all_reduce", ALL_RANKS, None, bucket):
                self.tell(bucket)
                self.add_up_devices(bucket)

    def spread(self) -> None:
        """Gives the sums over the processes, which the first device has, to the others."""
        first, *others = [flat.gradients for flat in self._flats]
        if others and self._between.hook is None:
            dispatch.broadcast_into(first, [list(each) for each in zip(*others, strict=True)])
