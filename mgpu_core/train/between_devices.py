"""A bucket's way between devices: the sum of what each has, cast for the way, or by a hook of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mgpu_core.comm import dispatch
from mgpu_core.optim.flat_buffers import part_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BetweenDevices", "CommHook", "GradientBucket"]


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

    def __init__(
        self,
        index: int,
        tensors: list[torch.Tensor],
        parameters: list[str],
        is_last: bool,
        group: ProcessGroup | None,
    ) -> None:
        self.index, self.tensors, self.parameters, self.is_last = index, tensors, parameters, is_last
        self.group = group


CommHook = Callable[[GradientBucket], None]


class BetweenDevices:
    """How buckets are summed over the devices of a process.

    Args:
        algorithm: of the all-reduce.
        comm_dtype: what gradients are cast to for the way; ``None``: their own.
        shards: each device needs the sum of its part alone, of so many; 1: all of it.
        group: of the other processes, which a hook is told of.
        ranks: per device its first rank: what a recording calls it.

    Attributes:
        shards: the same.
        hook: that does it instead.
    """

    def __init__(
        self,
        algorithm: str,
        comm_dtype: torch.dtype | None,
        shards: int,
        group: ProcessGroup | None,
        ranks: Sequence[int],
    ) -> None:
        self._algorithm, self._comm_dtype, self.shards, self._group = algorithm, comm_dtype, shards, group
        self._ranks = ranks
        self.hook: CommHook | None = None

    def add_up(
        self, index: int, tensors: Sequence[torch.Tensor], names: Callable[[], list[str]], is_last: bool
    ) -> None:
        """Leaves the sum of bucket ``index`` in the tensors of all devices, or in each its part."""
        own, wanted = tensors[0].dtype, self._comm_dtype
        narrow = wanted is not None and wanted != own and not own.is_complex
        sent = [tensor.to(wanted) for tensor in tensors] if narrow else list(tensors)
        if self.hook is not None:
            self.hook(GradientBucket(index, sent, names(), is_last, self._group))
        elif self.shards > 1 and self._group is None:
            parts = [part_of(each, place, self.shards) for place, each in enumerate(sent)]
            dispatch.reduce_scatter_into(sent, parts, "sum", self._ranks)
        else:
            dispatch.all_reduce_into(sent, "sum", self._algorithm, True, self._ranks)
        if narrow:
            for tensor, each in zip(tensors, sent, strict=True):
                tensor.copy_(each)
