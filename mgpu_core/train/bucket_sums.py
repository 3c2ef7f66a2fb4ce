"""Buckets that are laid out on all devices, and their sums: over the ranks of a device, then over the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from mgpu_core.comm import dispatch
from mgpu_core.comm.facts import tell_contents
from mgpu_core.comm.rank_sums import RankSums
from mgpu_core.entries import ALL_RANKS
from mgpu_core.optim.bucket_layout import Bucket
from mgpu_core.optim.flat_buffers import FlatTensors, part_of
from mgpu_core.record import is_on, span
from mgpu_core.train.replicas import Replicas

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BetweenDevices", "BucketSums", "CommHook", "GradientBucket"]

_gradient = attrgetter("grad")


@dataclass(eq=False)
class GradientBucket:
    """What a communication hook is given: one flat tensor of gradients per device, to be summed over the devices.

    Attributes:
        index: the bucket's number; buckets become ready in about this order.
        tensors: per device of the team the sum of its ranks' gradients, flat, with zeros between the parameters.  The
            hook leaves the sum over the devices, and over the processes of ``group``, in all of them.
        parameters: the names of the parameters in it.
        is_last: whether this is the last number.
        group: the ``process_group`` of the step; ``None``: there are no other processes.
    """

    index: int
    tensors: list[torch.Tensor]
    parameters: list[str]
    is_last: bool
    group: ProcessGroup | None


CommHook = Callable[[GradientBucket], None]


@dataclass(eq=False)
class BetweenDevices:
    """How buckets are summed over the devices of a process.

    Attributes:
        algorithm: of the all-reduce.
        comm_dtype: what gradients are cast to for the way; ``None``: their own.
        shards: each device needs the sum of its part alone, of so many; 1: all of it.
        group: of the other processes, which a hook is told of.
        ranks: per device its first rank: what a recording calls it.
        hook: sums the buckets instead.
    """

    algorithm: str
    comm_dtype: torch.dtype | None
    shards: int
    group: ProcessGroup | None
    ranks: Sequence[int]
    hook: CommHook | None = None


class BucketSums:
    """The sums of each bucket, always in the same memory.

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
        self._replicas, self._flats, self._between = replicas, flats, between
        self._members = [[each.parameter for each in bucket.segments] for bucket in buckets]
        self._plans = [  # per bucket, per device: the sums, and the parameters of each rank
            [
                (
                    RankSums([flat.gradient_views[i] for i in members], ranks),
                    [[replicas.parameters[rank][i] for i in members] for rank in ranks],
                )
                for ranks, flat in zip(replicas.ranks_of, flats, strict=True)
            ]
            for members in self._members
        ]

    def names(self, bucket: int) -> list[str]:
        """Return the names of a bucket's parameters."""
        return [self._replicas.names[i] for i in self._members[bucket]]

    def tell(self, bucket: int) -> None:
        """Tell a recording what the bucket holds."""
        if is_on():
            views = [self._flats[0].gradient_views[i] for i in self._members[bucket]]
            tell_contents("all_reduce", bucket, list(zip(self.names(bucket), views, strict=True)))

    def add_up_ranks(self, bucket: int, place: int) -> None:
        """Sum a bucket over the ranks of one device, on its current stream."""
        sums, columns = self._plans[bucket][place]
        sums.add_up(list(map(list, map(map, repeat(_gradient), columns))))

    def add_up_devices(self, bucket: int) -> None:
        """Sum a bucket over the devices, each of which holds the sum over its ranks: all of it, or each its part."""
        between, tensors = self._between, [flat.gradients[bucket] for flat in self._flats]
        own, wanted = tensors[0].dtype, between.comm_dtype
        is_cast = wanted is not None and wanted != own and not own.is_complex
        sent = [tensor.to(wanted) for tensor in tensors] if is_cast else tensors
        if between.hook is not None:
            is_last = bucket == len(self._members) - 1
            between.hook(GradientBucket(bucket, sent, self.names(bucket), is_last, between.group))
        elif between.shards > 1 and between.group is None:
            parts = [part_of(each, place, between.shards) for place, each in enumerate(sent)]
            dispatch.reduce_scatter_into(sent, parts, "sum", between.ranks)
        else:
            dispatch.all_reduce_into(sent, "sum", between.algorithm, True, between.ranks)
        if is_cast:
            for tensor, each in zip(tensors, sent, strict=True):
                tensor.copy_(each)

    def add_up_all_ranks(self, place: int) -> None:
        """Sum all buckets over the ranks of one device."""
        for bucket in range(len(self._members)):
            self.add_up_ranks(bucket, place)

    def add_up_all_devices(self) -> None:
        """Sum all buckets over the devices."""
        for bucket in range(len(self._members)):
            with span("all_reduce", ALL_RANKS, None, bucket):
                self.tell(bucket)
                self.add_up_devices(bucket)

    def spread(self) -> None:
        """Copy the sums over the processes, which the first device has, to the others."""
        first, *others = [flat.gradients for flat in self._flats]
        if others and self._between.hook is None:
            dispatch.broadcast_into(first, [list(each) for each in zip(*others, strict=True)])
