"""What a step has laid out: buckets of parameters in flat memory on each device, and the sums of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from mgpu_core.device.dtypes import has_gradients
from mgpu_core.optim.bucket_layout import Bucket, bucket_layout, shard_of
from mgpu_core.optim.flat_buffers import FlatTensors, padding_of, part_of
from mgpu_core.processes.ballot import tail_count
from mgpu_core.processes.group import Processes
from mgpu_core.processes.outbox import Outbox
from mgpu_core.train.bucket_sums import BetweenDevices, BucketSums
from mgpu_core.train.grad_clip import GradientNorm, Sums
from mgpu_core.train.replicas import Replicas

__all__ = ["LaidOut", "Learnt"]


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a layout follows from.

    Attributes:
        order: in which the first backward made gradients.
        loose: parameters whose gradients are sparse.
        wanted: parameters that may have gradients: what is frozen, and so is not, has no place in the buckets.
        updated: those that the optimizer has.
    """

    order: Sequence[int] = ()
    loose: Sequence[int] = ()
    wanted: Sequence[int] = ()
    updated: Collection[int] = ()


class LaidOut:
    """Buckets in the order in which the first backward made the gradients; then the rest, last ones first.

    What the optimizer does not have, keeps its memory: it may be another step's.

    Args:
        replicas: the ranks' modules.
        learnt: of their first backward; ``None``: there was none yet, and nothing is laid out.
        limit_nbytes: how many bytes travel together.
        between: how buckets are summed over the devices.
        processes: that train with this one; ``None``: it is alone.
        comm_dtype: what gradients are cast to for the way between processes; ``None``: their own.

    Attributes:
        is_empty: nothing is laid out.
        buckets: which parameters lie where.
        loose: parameters outside the buckets, whose gradients are sparse.
        flats: per device the flat values, and the sums of the gradients.
        shown: per parameter the sum of its gradients on the first device; ``None`` for one outside the buckets.
        sums: of the gradients.
        norm: what computes theirs.
        of_buckets: what makes them.
        outbox: where they go, to be summed over the processes.
    """

    def __init__(
        self,
        replicas: Replicas,
        learnt: Learnt | None,
        limit_nbytes: int,
        between: BetweenDevices,
        processes: Processes | None,
        comm_dtype: torch.dtype | None,
    ) -> None:
        self._replicas, self.is_empty = replicas, learnt is None
        learnt = learnt or Learnt()
        parameters, shards = replicas.parameters[0], between.shards
        self.loose = list(learnt.loose)
        order = list(dict.fromkeys([*learnt.order, *sorted(learnt.wanted, reverse=True)]))
        order = [i for i in order if i not in self.loose and has_gradients(parameters[i].dtype)]
        self._adopted = [i for i in order if i in learnt.updated or processes is not None]
        kept = {*self._adopted, *self.loose}
        self._left_out = [i for i, each in enumerate(parameters) if i not in kept and has_gradients(each.dtype)]
        self.buckets = _buckets_of(parameters, order, limit_nbytes, shards)
        self.bucket_of = {each.parameter: b for b, bucket in enumerate(self.buckets) for each in bucket.segments}
        tail = 0 if processes is None else tail_count(processes.count, len(parameters))
        self.flats = [
            FlatTensors(self.buckets, parameters, device, 0 if place else tail)
            for place, device in enumerate(replicas.devices)
        ]
        views = self.flats[0].gradient_views if self.flats else {}
        self.shown = [views.get(i) for i in range(len(parameters))]
        parts = [[part_of(each, place, shards) for each in flat.gradients] for place, flat in enumerate(self.flats)]
        cut = [[shard_of(bucket, place % shards, shards) for bucket in self.buckets] for place in range(len(parts))]
        padding = [[padding_of(each, flat.device) for each in of] for of, flat in zip(cut, self.flats, strict=True)]
        self.sums = Sums(parts, padding, [each for of in parts[:shards] for each in of])
        self.norm = GradientNorm(self.sums)
        self.of_buckets = BucketSums(replicas, self.buckets, self.flats, between)
        self.outbox: Outbox | None = None
        if processes is not None:
            self.outbox = Outbox(processes, self.flats[0].messages, len(parameters), comm_dtype)

    def take_values(self) -> None:
        """Makes the flat values the memory of the parameters that the step updates; others get theirs back."""
        self._replicas.adopt(self.flats, self._adopted)
        self._replicas.send_values(self._adopted)  # each rank's first forward may have put its own there

    def outgrown_by(self, updated: Callable[[], Collection[int]]) -> str | None:
        """The name of a parameter that was thawed, or has come to the optimizer, since; ``None``: none, or all may.

        Args:
            updated: the parameters that the optimizer has now.
        """
        for i in () if self.is_empty else self._left_out:
            if self._replicas.own[i].requires_grad and (i not in self.bucket_of or i in updated()):
                return self._replicas.names[i]
        return None


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
