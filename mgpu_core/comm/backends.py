"""Which backend of the core serves these tensors, and on which streams.

Each function answers for one way in which the core looks at tensors.  ``None`` means that plain torch serves them:
devices of several kinds, a kind that the core has no backend for, or memory that is not laid out as the core needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.comm.layout import memory_order, one_layout, runs_along
from mgpu_core.devices.streams import HOST, core_serves, core_stream, core_streams

__all__ = ["Stream", "alike", "common_order", "cut", "for_sum", "joined", "root_and_ranks"]

Stream: TypeAlias = _core.Stream
Tensors: TypeAlias = Sequence[torch.Tensor]


def _streams_of(tensors: Tensors) -> list[Stream] | None:
    return core_streams([tensor.device for tensor in tensors])


def alike(tensors: Tensors) -> list[Stream] | None:
    """Return a stream per tensor for arithmetic element by element: dense tensors in one layout; else ``None``."""
    return _streams_of(tensors) if one_layout(tensors) else None


def joined(tensors: Tensors) -> list[Stream] | None:
    """Return a stream per tensor for rows one after the other: contiguous tensors; else ``None``."""
    return _streams_of(tensors) if all(tensor.is_contiguous() for tensor in tensors) else None


def root_and_ranks(root: torch.device, ranks: Sequence[torch.device]) -> tuple[Stream, list[Stream]] | None:
    """Return the stream of the root's device and one per rank; ``None`` unless one backend serves all of them."""
    if root.type == "cpu":
        for each in ranks:
            if each.type != "cpu":
                return None
        return HOST, [HOST] * len(ranks)
    streams = core_streams([root, *ranks])
    return None if streams is None else (streams[0], streams[1:])


def for_sum(parts: Sequence[torch.Tensor | None], device: torch.device) -> bool:
    """Return whether a sum of those that are there, on that device, is arithmetic of one backend."""
    present = [part for part in parts if part is not None]
    return one_layout(present) and core_serves([device, *(part.device for part in present)])


_NARROW_NBYTES = 256  # a copy engine takes about as long for a run of one byte as for one of this many
_WIDEST_PITCH = 2**31 - 1  # from run to run, that a copy engine can


def common_order(tensors: Tensors) -> torch.memory_format | None:
    """Return the order of dimensions in which all of these are dense; ``None`` if there is none."""
    order = memory_order(tensors[0])
    for each in tensors[1:]:
        if memory_order(each) is not order:
            return None
    return order


def cut(
    whole: torch.Tensor, parts: Tensors, dim: int, order: torch.memory_format
) -> tuple[Stream, list[Stream]] | None:
    """Return the streams of the whole and of its parts along ``dim``, all dense in ``order``; for scatter and gather.

    The whole may be on the host.  Not in pinned memory, which a GPU reads by itself: torch's copies know when such
    memory may be used again.  Nor in narrow strips of a GPU's memory, which torch's kernels copy faster.
    """
    devices = [part.device for part in parts]
    if whole.device.type == "cpu":
        found = root_and_ranks(whole.device, devices)
        if found is not None or whole.is_pinned():
            return found
    one, many = core_stream(whole.device), core_streams(devices)
    if one is None or many is None or devices[0].type == "cpu" or _is_narrow(whole, parts, dim, order):
        return None
    return one, many


def _is_narrow(whole: torch.Tensor, parts: Tensors, dim: int, order: torch.memory_format) -> bool:
    outer, inner = runs_along(whole.shape, dim, order)
    row_nbytes = inner * whole.itemsize
    narrowest = min(part.size(dim) for part in parts) * row_nbytes
    return outer > 1 and (narrowest < _NARROW_NBYTES or whole.size(dim) * row_nbytes > _WIDEST_PITCH)
