"""Which room of the core serves these tensors, and on which streams.

Each function answers for one way in which the core looks at tensors; ``None`` means that the generic room serves them:
devices of several kinds, a kind that the core has no room for, or memory that is not laid out as the core needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from mgpu_core.comm.layout import memory_order, one_layout, runs_along
from mgpu_core.device.streams import core_serves, core_stream, core_streams

__all__ = ["Stream", "alike", "cut", "for_sum", "joined", "root_and_ranks"]

Stream: TypeAlias = tuple[int, int]
Tensors: TypeAlias = Sequence[torch.Tensor]


def _streams_of(tensors: Tensors) -> list[Stream] | None:
    return core_streams([tensor.device for tensor in tensors])


def alike(tensors: Tensors) -> list[Stream] | None:
    """For arithmetic element by element: dense, in one layout."""
    return _streams_of(tensors) if one_layout(tensors) else None


def joined(tensors: Tensors) -> list[Stream] | None:
    """For rows one behind the other: contiguous."""
    return _streams_of(tensors) if all(tensor.is_contiguous() for tensor in tensors) else None


def root_and_ranks(devices: Sequence[torch.device]) -> tuple[Stream, list[Stream]] | None:
    """The stream of the first device, the root's, and those of the others, the ranks'."""
    streams = core_streams(devices)
    return None if streams is None else (streams[0], streams[1:])


def for_sum(parts: Sequence[torch.Tensor | None], device: torch.device) -> bool:
    """Whether a sum of those that are there, on that device, is arithmetic of one room."""
    present = [part for part in parts if part is not None]
    return one_layout(present) and core_serves([device, *(part.device for part in present)])


_NARROW_NBYTES = 256  # a copy engine takes about as long for a run of one byte as for one of this many
_WIDEST_PITCH = 2**31 - 1  # from run to run, that a copy engine can


def cut(whole: torch.Tensor, parts: Tensors, dim: int) -> tuple[Stream, list[Stream]] | None:
    """For scatter and gather along ``dim``: dense in one order of dimensions, in one room; or the whole on the host.

    Not in pinned memory, which a GPU reads by itself: torch's copies know when such memory may be used again.  Nor in
    narrow strips of a GPU's memory, which torch's kernels copy faster than a copy engine.
    """
    order = memory_order(whole)
    if order is None or any(memory_order(part) is not order for part in parts):
        return None
    one, many = core_stream(whole.device), _streams_of(parts)
    if one is None or many is None:
        return None
    whole_on_host, parts_on_host = whole.device.type == "cpu", parts[0].device.type == "cpu"
    if parts_on_host and not whole_on_host:
        return None
    if whole_on_host and not parts_on_host and whole.is_pinned():
        return None
    if not parts_on_host and _is_narrow(whole, parts, dim, order):
        return None
    return one, many


def _is_narrow(whole: torch.Tensor, parts: Tensors, dim: int, order: torch.memory_format) -> bool:
    outer, inner = runs_along(whole.shape, dim, order)
    row_nbytes = inner * whole.element_size()
    narrowest = min(part.size(dim) for part in parts) * row_nbytes
    return outer > 1 and (narrowest < _NARROW_NBYTES or whole.size(dim) * row_nbytes > _WIDEST_PITCH)
