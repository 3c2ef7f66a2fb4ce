"""The flat buckets of one device: the values of the parameters and the sums of their gradients.

A parameter's ``data`` becomes a part of its bucket, with strides of its own (channels_last stays channels_last), and a
storage of its own: savers that know tensors by their storage would take all parameters of a bucket for one.  All ranks
of the device share the values; each has its own gradients, whose sum over the ranks lies here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Protocol

import torch

from mgpu_core.comm.layout import is_dense
from mgpu_core.devices.tensor_checks import are_held_elsewhere, holders_of
from mgpu_core.devices.transfer import copy_into
from mgpu_core.optim.bucket_layout import Bucket
from mgpu_core.support.warnings import warn_user

__all__ = [
    "FlatTensors",
    "Holder",
    "compact",
    "holders",
    "in_memory_order",
    "padding_of",
    "part_of",
    "shaped",
    "warn_of_holders",
]


class FlatTensors:
    """Values and gradients of one device, bucket by bucket; padding is zero and stays it.

    There is no memory for gradients until somebody asks for it.

    Args:
        buckets: the layout.
        parameters: all parameters; those that no bucket names are left alone.
        device: where.

    Attributes:
        values: one flat tensor per bucket.
        value_views: by parameter, in its shape.
    """

    is_cut = False  # the device keeps a part of each bucket

    def __init__(self, buckets: Sequence[Bucket], parameters: Sequence[torch.Tensor], device: torch.device) -> None:
        self.device = device
        self._buckets, self._parameters = buckets, parameters
        self.values, self.value_views = self._new()
        holders.add(self)

    def _new(self) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """Return one flat tensor of zeros per bucket, and by parameter the view that it gets of its bucket."""
        dtypes = [self._parameters[bucket.segments[0].parameter].dtype for bucket in self._buckets]
        counts = [bucket.count for bucket in self._buckets]
        flats = [torch.zeros(n, dtype=dtype, device=self.device) for n, dtype in zip(counts, dtypes, strict=True)]
        return flats, {i: _with_own_storage(view) for i, view in self.views_of(flats).items()}

    @cached_property
    def _of_gradients(self) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        return self._new()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """One flat tensor per bucket."""
        return self._of_gradients[0]

    @property
    def gradient_views(self) -> dict[int, torch.Tensor]:
        """The views of gradients, by parameter, in its shape."""
        return self._of_gradients[1]

    def parts_of_values(self, index: int, shards: int) -> list[torch.Tensor]:
        """Return of each bucket's values part ``index`` of so many, which this device updates."""
        return [part_of(each, index, shards) for each in self.values]

    def parts_of_gradients(self, index: int, shards: int) -> list[torch.Tensor]:
        """Return the same parts of the gradients."""
        return [part_of(each, index, shards) for each in self.gradients]

    def views_of(self, flats: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return, by parameter, its part of flat tensors that are like the values."""
        return {
            segment.parameter: shaped(flat, segment.begin, self._parameters[segment.parameter])
            for bucket, flat in zip(self._buckets, flats, strict=True)
            for segment in bucket.segments
        }

    def adopt(self, parameters: Sequence[torch.Tensor], indices: Collection[int]) -> None:
        """Copy the values of some of these parameters, and make the views their ``data``."""
        with torch.no_grad():
            for i in indices:
                copy_into(self.value_views[i], parameters[i])
        self.show_to(parameters, indices)

    @property
    def held(self) -> Iterable[torch.Tensor]:
        """Return the views of the values."""
        return self.value_views.values()

    def count_holders(self, index: int) -> int:
        """Return how many tensors have the memory of a parameter's values, all in all."""
        return holders_of(self.value_views[index])

    def renew(self, indices: Collection[int]) -> list[int]:
        """Copy the values of buckets with some of these parameters to other memory; return all parameters in them.

        Who holds the memory of before keeps it as it is.
        """
        members: list[int] = []
        for number, bucket in enumerate(self._buckets):
            inside = [segment.parameter for segment in bucket.segments]
            if not set(indices).isdisjoint(inside):
                flat = self.values[number] = self.values[number].clone()
                for segment in bucket.segments:
                    view = shaped(flat, segment.begin, self.value_views[segment.parameter])
                    self.value_views[segment.parameter] = _with_own_storage(view)
                members += inside
        return members

    def show_to(self, parameters: Sequence[torch.Tensor], indices: Collection[int]) -> None:
        """Make the views the ``data`` of another rank's parameters."""
        for i in indices:
            parameters[i].data = self.value_views[i]


class Holder(Protocol):
    """Holds memory of parameters for a step or an optimizer."""

    @property
    def held(self) -> Iterable[torch.Tensor]:
        """Return the tensors with such memory."""


holders: weakref.WeakSet[Holder] = weakref.WeakSet()
"""The objects of this package that hold memory of parameters; of several steps over one module each does."""


def warn_of_holders(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Warn of parameters whose memory is held by others, too, before their values go to other memory.

    Args:
        parameters: that will have flat memory.
        names: of these.
    """
    known = {id(each): each for each in chain(parameters, *(holder.held for holder in list(holders)))}
    are_held = are_held_elsewhere(parameters, list(known.values()))
    if any(are_held) and gc.collect():  # this step's graph may wait in a reference cycle
        are_held = are_held_elsewhere(parameters, list(known.values()))
    held = [name for name, is_held in zip(names, are_held, strict=True) if is_held]
    if held:
        warn_user(
            f"the memory of {', '.join(held[:3])}{f' and {len(held) - 3} more' if held[3:] else ''} is held by others, "
            "too: by a numpy array, a state_dict() or .data that was kept, another process (share_memory()), or a "
            "graph that is alive. From this update on the values lie in flat memory, and such holders see those of "
            "before. Take them after the first step, or copy them"
        )


def shaped(flat: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """Return the elements from ``begin`` on as a view with the shape and strides of a parameter."""
    if is_dense(like):
        return flat.as_strided(like.shape, like.stride(), begin)
    return flat[begin : begin + like.numel()].view(like.shape)


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return a view whose storage ends where the view does, and keeps the memory around it alive."""
    begin = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[begin : begin + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


def part_of(flat: torch.Tensor, index: int, shards: int) -> torch.Tensor:
    """Return the part of a flat bucket that device ``index`` updates."""
    count = flat.numel() // shards
    index %= shards  # all devices update the only one
    return flat[index * count : (index + 1) * count]


def padding_of(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """Return the indices of a flat bucket, or of a shard of one, that belong to no parameter."""
    begins = [*(each.begin for each in bucket.segments), bucket.count]
    ends = [0, *(each.begin + each.count for each in bucket.segments)]
    gaps = [range(end, begin) for end, begin in zip(ends, begins, strict=True)]
    return torch.tensor(list(chain.from_iterable(gaps)), dtype=torch.int64, device=device)


def in_memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in one row, in the order in which a bucket holds the parameter ``like``.

    A view, if the tensor has the parameter's strides.
    """
    if not is_dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of its own, with the same strides."""
    return tensor.detach().clone(memory_format=torch.preserve_format)
