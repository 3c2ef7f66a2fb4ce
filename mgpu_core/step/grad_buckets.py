r"""Buckets of parameters in flat memory on each device, and the sums of their gradients.

A bucket's gradients are added up over the ranks of each device, then over the devices, always in the same memory::

    rank 0  rank 1      rank 2  rank 3      gradients as autograd made them, one tensor per parameter
        \  /                \  /
      RankSums            RankSums          one pass into the flat bucket of each device
          \__ over devices __/              all-reduce, reduce-scatter or the user's hook
                    |
               ProcessSums                  over the processes, if there are others
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeAlias

import torch

from mgpu_core.comm import dispatch
from mgpu_core.comm.rank_sums import RankSums
from mgpu_core.comm.trace_hooks import trace_contents
from mgpu_core.devices.absent_memory import drop_memory, restore_memory
from mgpu_core.devices.dtypes import has_gradients
from mgpu_core.optim.bucket_layout import Bucket, bucket_layout, shard_of
from mgpu_core.optim.flat_buffers import FlatTensors, padding_of, part_of
from mgpu_core.step.grad_clip import Sums, is_finite, norm_of
from mgpu_core.step.options import Options
from mgpu_core.step.process_sums import ProcessSums, Weight
from mgpu_core.step.replicas import Replicas
from mgpu_core.step.shards import Shards

__all__ = ["BackwardOrder", "Columns", "CommHook", "Communication", "GradBuckets", "GradientBucket"]

Columns: TypeAlias = dict[int, list[torch.Tensor | None]]


@dataclass(eq=False)
class GradientBucket:
    """One flat tensor of gradients per device, which a communication hook sums over the devices.

    Attributes:
        index: the bucket's number; buckets become ready in about this order.
        tensors: per device of the team the sum of its ranks' gradients, flat, with zeros between the parameters.  The
            hook leaves the sum over the devices in all of them.
        parameters: the names of the parameters in it.
        is_last: whether this is the last number.
    """

    index: int
    tensors: list[torch.Tensor]
    parameters: list[str]
    is_last: bool


CommHook = Callable[[GradientBucket], None]


@dataclass(eq=False)
class Communication:
    """How buckets are cut and summed over devices and processes.

    Attributes:
        options: of the step.
        processes: the sums over all processes; ``None``: there are no others.
        hook: sums the buckets over the devices instead of the all-reduce.
        are_parts: no device has whole sums.
        shards: each device needs the sum of its part alone, of so many; 1: all of it.
    """

    options: Options
    processes: ProcessSums | None
    hook: CommHook | None = None
    are_parts: bool = field(init=False)
    shards: int = field(init=False)

    def __post_init__(self) -> None:
        self.shards = len(set(self.options.team.devices)) if self.options.shard else 1
        is_cut = self.options.shard == "parameters"
        self.are_parts = self.shards > 1 or is_cut
        if is_cut and self.shards > 1 and self.processes is not None and self.processes.backend != "gloo":
            raise ValueError(
                f'shard="parameters" over {self.shards} devices of a process sums over the processes on each of them, '
                f"for which {self.processes.backend} wants a process per device: use a group of gloo, or one device"
            )


@dataclass(frozen=True, slots=True)
class BackwardOrder:
    """The observations of the first backward, from which the layout follows.

    Attributes:
        order: the parameters, in the order in which their gradients were made.
        sparse: parameters whose gradients are sparse.
        wanted: parameters that may have gradients; the others, frozen ones, are in no bucket.
        updated: parameters that the optimizer has.
    """

    order: Sequence[int] = ()
    sparse: Sequence[int] = ()
    wanted: Sequence[int] = ()
    updated: Collection[int] = ()


class GradBuckets:
    """Buckets in the order in which the first backward made the gradients, then the rest, last ones first.

    Parameters that the optimizer does not have keep their memory: they may be another step's.

    Args:
        replicas: the ranks' parameters.
        learnt: of their first backward; ``None``: there was none yet, and there are no buckets.
        communication: how buckets are cut and summed.
        cut: parameters in shards, whose layout follows from the module; ``None``: they are whole.

    Attributes:
        is_empty: there was no backward yet.
        has_devices: there are several.
        processes: the sums over processes that follow those over devices; ``None``: none do.
        buckets: which parameters lie where.
        numbers: of the buckets.
        members: per bucket its parameters.
        leaves: the same by bucket and rank, as Parameters.
        bucket_of: by parameter the number of its bucket.
        nothing: per bucket the gradients of a rank that adds none.
        left_out: parameters that are not the step's yet, which a later update may have to adopt.
        sparse: parameters outside the buckets, whose gradients are sparse.
        flats: per device the flat values, and the sums of the gradients.
        shown: per parameter the sum of its gradients on the first device; ``None`` for one outside the buckets.
        sums: of the gradients.
        norm: of the sums.
    """

    def __init__(
        self,
        replicas: Replicas,
        learnt: BackwardOrder | None,
        communication: Communication,
        cut: Shards | None = None,
    ) -> None:
        self._replicas, self._communication, self.is_empty = replicas, communication, learnt is None
        processes, shards = communication.processes, communication.shards
        parameters = replicas.own
        backward = learnt or BackwardOrder()
        self.sparse = list(backward.sparse)
        order = list(dict.fromkeys([*backward.order, *sorted(backward.wanted, reverse=True)]))
        order = [i for i in order if i not in self.sparse and has_gradients(parameters[i].dtype)]
        self._adopted = [i for i in order if i in backward.updated or processes is not None]
        kept = {*self._adopted, *self.sparse} if learnt else range(len(parameters))
        self.left_out = [i for i, each in enumerate(parameters) if i not in kept and has_gradients(each.dtype)]
        if cut is None:
            self.buckets = _buckets_of(parameters, order, communication.options.bucket_nbytes, shards)
            self.flats = [FlatTensors(self.buckets, parameters, device) for device in replicas.devices]
        else:
            self.buckets, self.flats, self.left_out, self.is_empty = cut.buckets, [*cut.flats], [], False
        self._is_cut, self.has_devices = cut is not None, len(self.flats) > 1
        self._are_absent = self._is_cut and self.has_devices
        self.processes = None if self._is_cut else processes
        self._before: dict[int, list[torch.Tensor]] = {}  # sums to which others are added, by bucket and part
        self.members = [[each.parameter for each in bucket.segments] for bucket in self.buckets]
        self.leaves = [[[row[i] for i in members] for row in replicas.parameters] for members in self.members]
        self.numbers = dict.fromkeys(range(len(self.buckets))).keys()  # a set that has an order
        self.bucket_of = {i: number for number, members in enumerate(self.members) for i in members}
        views = self.flats[0].gradient_views
        self.shown = [views.get(i) for i in range(len(parameters))]
        self.sums = _sums_in(self.flats, self.buckets, shards)
        self._wholes = [[flat.gradients[bucket] for flat in self.flats] for bucket in range(len(self.buckets))]
        self._parts = [[of_device[bucket] for of_device in self.sums.parts] for bucket in range(len(self.buckets))]
        self.nothing: list[list[torch.Tensor | None]] = [[None] * len(members) for members in self.members]
        self.norm = norm_of(self.sums, may_be_sparse=bool(self.sparse))
        self._firsts = [ranks[0] for ranks in replicas.ranks_of]  # what a recording calls the devices
        devices = range(len(self.flats))
        self._rank_sums = [[self._sums_on(index, members) for index in devices] for members in self.members]
        if processes is not None:
            messages = self.sums.every_sum if self._is_cut else self.flats[0].gradients
            processes.use(messages, communication.options.comm_dtype)

    def _sums_on(self, index: int, members: Sequence[int]) -> RankSums:
        """Return the sum of a bucket over one device's ranks."""
        views = self.flats[index].gradient_views
        return RankSums([views[i] for i in members], self._replicas.ranks_of[index], are_absent=self._are_absent)

    def take_values(self) -> None:
        """Make the flat values the memory of the parameters that the step updates; others get theirs back."""
        self._replicas.adopt(self.flats, self._adopted)
        self._replicas.send_values(self._adopted)  # each rank's first forward may have put its own there

    def parameter_to_add(self, updated: Callable[[], Collection[int]]) -> str | None:
        """Return the name of a parameter that must be in a bucket by now; ``None``: none does.

        It was thawed, or has come to the optimizer, since the layout was made.

        Args:
            updated: returns the parameters that the optimizer has now.
        """
        for i in self.left_out:
            if self._replicas.own[i].requires_grad and (i not in self.bucket_of or i in updated()):
                return self._replicas.names[i]
        return None

    def not_finite(self) -> int | None:
        """Return the first parameter whose sum is NaN or infinite; waits for the devices."""
        shards = self._communication.shards
        some = {i for i, gradient in self.sums.sparse.items() if not is_finite(gradient)}
        for index, parts in enumerate(self.sums.parts[:shards]):
            for bucket, part in zip(self.buckets, parts, strict=True):
                for segment in shard_of(bucket, index, shards).segments:
                    if not is_finite(part[segment.begin : segment.begin + segment.count]):
                        some.add(segment.parameter)
        return min(some, default=None)

    def names(self, bucket: int) -> list[str]:
        """Return the names of a bucket's parameters."""
        return [self._replicas.names[i] for i in self.members[bucket]]

    def tell(self, bucket: int) -> None:
        """Emit the contents of a bucket; nothing in shards, whose parts are no tensors of the user's."""
        if self._is_cut:
            return
        views = [self.flats[0].gradient_views[i] for i in self.members[bucket]]
        trace_contents("all_reduce", bucket, list(zip(self.names(bucket), views, strict=True)))

    def set_aside(self, bucket: int) -> None:
        """Keep the sums of a bucket, to which :meth:`add_devices` adds those that come; on the current streams."""
        self._before[bucket] = [part.clone() for part in self._parts[bucket]]

    def add_ranks(self, bucket: int, index: int, columns: Columns, *, goes_on: bool) -> None:
        """Sum a bucket over the ranks of a device, on its current stream.

        Of parameters in shards over several devices the sum has memory from now on until :meth:`add_devices`.

        Args:
            bucket: its number.
            index: of the device.
            columns: by rank its gradients of the bucket's parameters; the others add nothing.
            goes_on: they are added to those that the device has summed before.
        """
        whole = self._wholes[bucket][index]
        before = whole.clone() if goes_on else None
        if self._are_absent and not goes_on:
            restore_memory(whole, self._text_of(bucket))
        ranks = self._replicas.ranks_of[index]
        self._rank_sums[bucket][index].add_up(list(map(columns.get, ranks, repeat(self.nothing[bucket]))))
        if before is not None:
            whole.add_(before)

    def add_devices(self, bucket: int) -> None:
        """Sum a bucket over the devices, on their current streams; in shards each device keeps its part."""
        parts = self._parts[bucket]
        try:
            if self.has_devices:
                self._add_up_devices(bucket, parts if self._are_absent else ())
        finally:
            self._drop(bucket)
        for index, part in enumerate(parts if self._are_absent else ()):
            padding = self.sums.padding[index][bucket]
            if padding.numel():  # new memory is not zero
                part.index_fill_(0, padding, 0)
        for part, before in zip(parts, self._before.pop(bucket, ()), strict=False):
            part.add_(before)

    def drop(self) -> None:
        """Forget sums that were begun."""
        self._before.clear()
        for bucket in self.numbers:
            self._drop(bucket)

    def _drop(self, bucket: int) -> None:
        """Free the whole sums of a bucket in shards."""
        for whole in self._wholes[bucket] if self._are_absent else ():
            drop_memory(whole, self._text_of(bucket))

    def _text_of(self, bucket: int) -> str:
        return f"the gradients of {self.names(bucket)[0]} have no memory now"

    def _add_up_devices(self, bucket: int, parts: Sequence[torch.Tensor] = ()) -> None:
        """Sum a bucket over the devices, each of which holds the sum over its ranks: all of it, or each its part.

        Args:
            bucket: its number.
            parts: where the devices' parts of the sum go; empty: they stay where they are in it.
        """
        communication, tensors = self._communication, self._wholes[bucket]
        options, processes = communication.options, communication.processes
        dtype, wanted = tensors[0].dtype, options.comm_dtype
        is_cast = wanted is not None and wanted != dtype and not dtype.is_complex
        sent = [tensor.to(wanted) for tensor in tensors] if is_cast else tensors
        if communication.hook is not None:
            is_last = bucket == len(self.buckets) - 1
            communication.hook(GradientBucket(bucket, sent, self.names(bucket), is_last))
        elif communication.shards > 1 and (processes is None or self._is_cut):
            outs = [part_of(each, index, communication.shards) for index, each in enumerate(sent)]
            if parts and not is_cast:
                outs, parts = [*parts], ()
            dispatch.reduce_scatter_into(sent, outs, "sum", self._firsts)
        else:
            dispatch.all_reduce_into(sent, "sum", options.algorithm, True, self._firsts)
        if is_cast:
            for tensor, message in zip(tensors, sent, strict=True):
                tensor.copy_(message)
        for index, part in enumerate(parts):
            part.copy_(part_of(tensors[index], index, communication.shards))

    def finish_processes(
        self, processes: ProcessSums, weight: Weight, used: Sequence[bool]
    ) -> tuple[Weight, list[bool]]:
        """Finish the sums over processes, and bring them to all devices; those of parts begin here.

        Args:
            processes: sums the messages.
            weight: of this process's gradients.
            used: per parameter whether a rank of this process used it.

        Returns:
            Both for all processes.
        """
        for message in range(len(self.sums.every_sum)) if self._is_cut else ():
            processes.put(message)
        totals = processes.finish(weight, used)
        first, *others = [flat.gradients for flat in self.flats]
        if others and not self._is_cut:
            dispatch.broadcast_into(first, [list(each) for each in zip(*others, strict=True)])
        return totals


def _buckets_of(
    parameters: Sequence[torch.Tensor], order: Sequence[int], limit_nbytes: int, shards: int
) -> tuple[Bucket, ...]:
    kinds = {dtype: kind for kind, dtype in enumerate(dict.fromkeys(each.dtype for each in parameters))}
    return bucket_layout(
        [each.numel() for each in parameters],
        [each.element_size() for each in parameters],
        [kinds[each.dtype] for each in parameters],
        order,
        limit_nbytes,
        shards,
    )


def _sums_in(flats: Sequence[FlatTensors], buckets: Sequence[Bucket], shards: int) -> Sums:
    """Return the sums of gradients in the flat memory of each device."""
    parts = [flat.parts_of_gradients(index, shards) for index, flat in enumerate(flats)]
    padding = [
        [padding_of(shard_of(bucket, index % shards, shards), flat.device) for bucket in buckets]
        for index, flat in enumerate(flats)
    ]
    return Sums(parts, padding, [each for of in parts[:shards] for each in of])
