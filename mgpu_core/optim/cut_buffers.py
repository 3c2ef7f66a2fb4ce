"""The flat buckets of one device that keeps a part of each::

    device 0   part 0 ─┐                          device 0   [ part 0 | part 1 | part 2 ]  while somebody needs them
    device 1   part 1 ─┼─ fill: a copy of each ──
    device 2   part 2 ─┘                          otherwise  no memory, and an error that says so

The storage of a whole bucket stays the same one, so that the parameters, which are views of it, and tensors that
autograd has saved are valid again when it is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch

from mgpu_core.devices.absent_memory import absent_like, drop_memory
from mgpu_core.devices.transfer import copy_into
from mgpu_core.optim.bucket_layout import Bucket, Segment, shard_of
from mgpu_core.optim.flat_buffers import FlatTensors, in_memory_order, shaped

__all__ = ["CutTensors"]


class CutTensors(FlatTensors):
    """Values and gradients of one device: its part of each bucket, and whole ones that have memory at times.

    Args:
        buckets: the layout, for ``count`` devices.
        parameters: all parameters; those that no bucket names are left alone.
        device: where.
        index, count: which part it keeps, of how many.
        texts: per bucket of the error that any access to one without memory raises.

    Attributes:
        texts: the same.
        value_parts: one flat tensor per bucket.
    """

    is_cut = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[torch.Tensor],
        device: torch.device,
        index: int,
        count: int,
        texts: Sequence[str],
    ) -> None:
        self.texts, self._index, self._count = texts, index, count
        super().__init__(buckets, parameters, device)
        self._pieces: dict[int, tuple[int, Segment]] = {}
        for number, bucket in enumerate(buckets):
            for segment in shard_of(bucket, index, count).segments:
                self._pieces[segment.parameter] = number, segment
        self.value_parts = [self._part(each) for each in self.values]

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return torch.zeros(whole.numel() // self._count, dtype=whole.dtype, device=self.device)

    def _new(self) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """Return one flat tensor per bucket, and by parameter a view of it; they have no memory."""
        flats, views = list[torch.Tensor](), dict[int, torch.Tensor]()
        for bucket, text in zip(self._buckets, self.texts, strict=True):
            flat = torch.empty(bucket.count, dtype=self._dtype_of(bucket), device=self.device)
            views |= _views_of(flat, bucket, self._parameters)
            drop_memory(flat, text)
            flats.append(flat)
        return flats, views

    def _dtype_of(self, bucket: Bucket) -> torch.dtype:
        return self._parameters[bucket.segments[0].parameter].dtype

    @cached_property
    def _of_gradients(self) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """Whole sums have no memory, or are the parts where these are all."""
        return (self.gradient_parts, self.views_of(self.gradient_parts)) if self._count == 1 else self._new()

    def stand_ins(self) -> dict[int, torch.Tensor]:
        """Return by parameter a tensor like it that never has memory, for the time between steps."""
        views: dict[int, torch.Tensor] = {}
        for flat, bucket, text in zip(self.values, self._buckets, self.texts, strict=True):
            views |= _views_of(absent_like(flat, text), bucket, self._parameters)
        return views

    @cached_property
    def gradient_parts(self) -> list[torch.Tensor]:
        """One flat tensor per bucket."""
        return [self._part(each) for each in self.values]

    @property
    def held(self) -> Iterable[torch.Tensor]:
        """Return the parts of the values."""
        return self.value_parts

    def parts_of_values(self, index: int, shards: int) -> list[torch.Tensor]:
        """Return the parts that this device updates."""
        return self.value_parts

    def parts_of_gradients(self, index: int, shards: int) -> list[torch.Tensor]:
        """Return the sums by which this device updates."""
        return self.gradient_parts

    def put(self, i: int, value: torch.Tensor) -> None:
        """Copy this device's part of a parameter's value, which lies on any device."""
        if i in self._pieces:
            number, segment = self._pieces[i]
            values = in_memory_order(value, self.value_views[i])[segment.offset : segment.offset + segment.count]
            copy_into(self.value_parts[number][segment.begin : segment.begin + segment.count], values)

    def bring(self, i: int, whole: torch.Tensor) -> None:
        """Copy this device's part of a parameter into ``whole``, flat, in the order of memory."""
        if i in self._pieces:
            number, segment = self._pieces[i]
            part = self.value_parts[number][segment.begin : segment.begin + segment.count]
            copy_into(whole[segment.offset : segment.offset + segment.count], part)


def _views_of(flat: torch.Tensor, bucket: Bucket, parameters: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the parameters' views of a bucket, which count writes for themselves: to fill the bucket is none."""
    return {each.parameter: shaped(flat, each.begin, parameters[each.parameter]).data for each in bucket.segments}
