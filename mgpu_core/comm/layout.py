"""How tensors lie in memory, as far as the core needs to know, and which backend of the core serves them.

The core moves dense blocks.  A tensor is one when its elements fill a range without gaps, in whatever order of
dimensions: contiguous, or channels_last.  Cut along a dimension, it is ``outer`` runs of ``rows`` times ``inner``
elements (see csrc/core/transfer.h); a part in the same order of dimensions is dense too.

Each function that returns streams answers for one way in which the core looks at tensors.  ``None`` means that plain
torch serves them: devices of several kinds, a kind that the core has no backend for, or memory that is not laid out as
the core needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.devices.streams import HOST, core_serves, core_stream, core_streams

__all__ = [
    "Stream",
    "common_order",
    "for_sum",
    "is_dense",
    "memory_order",
    "nbytes_of",
    "one_layout",
    "runs_along",
    "streams_alike",
    "streams_joined",
    "streams_of_cut",
    "streams_of_root",
]

Stream: TypeAlias = _core.Stream
Tensors: TypeAlias = Sequence[torch.Tensor]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_order(tensor: torch.Tensor) -> torch.memory_format | None:
    """``contiguous_format``, a channels_last format, or ``None`` for a tensor that is neither."""
    if tensor.layout is not torch.strided:
        return None
    if tensor.is_contiguous():
        return torch.contiguous_format
    last = _CHANNELS_LAST.get(tensor.dim())
    return last if last is not None and tensor.is_contiguous(memory_format=last) else None


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a range without gaps or overlaps, in any order of dimensions."""
    wanted = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != wanted:
                return False
            wanted *= size
    return True


def one_layout(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors of one shape are dense and hold their elements in one order: bytes match elements."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            break
    else:
        return True
    first = tensors[0]
    order = memory_order(first)
    if order is not None:
        return all(memory_order(tensor) is order for tensor in tensors)
    if first.layout is not torch.strided or not is_dense(first):
        return False
    return all(tensor.layout is torch.strided and tensor.stride() == first.stride() for tensor in tensors)


def nbytes_of(tensor: torch.Tensor | None) -> int:
    """Return the bytes that travel with a tensor: of a sparse one its indices and values, of ``None`` 0."""
    if tensor is None:
        return 0
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.values().nbytes


@lru_cache(maxsize=256)
def runs_along(shape: tuple[int, ...], dim: int, order: torch.memory_format) -> tuple[int, int]:
    """Return (outer, inner) of a dense tensor of this shape, cut along ``dim``; inner in elements."""
    dims = list(range(len(shape)))
    if order is not torch.contiguous_format:
        dims = [0, *dims[2:], 1]  # slowest to fastest: the channels are last
    position = dims.index(dim)
    outer = inner = 1
    for slower in dims[:position]:
        outer *= shape[slower]
    for faster in dims[position + 1 :]:
        inner *= shape[faster]
    return outer, inner


def _streams_of(tensors: Tensors) -> list[Stream] | None:
    return core_streams([tensor.device for tensor in tensors])


def streams_alike(tensors: Tensors) -> list[Stream] | None:
    """Return a stream per tensor for arithmetic element by element: dense tensors in one layout; else ``None``."""
    return _streams_of(tensors) if one_layout(tensors) else None


def streams_joined(tensors: Tensors) -> list[Stream] | None:
    """Return a stream per tensor for rows one after the other: contiguous tensors; else ``None``."""
    return _streams_of(tensors) if all(tensor.is_contiguous() for tensor in tensors) else None


def streams_of_root(root: torch.device, ranks: Sequence[torch.device]) -> tuple[Stream, list[Stream]] | None:
    """Return the stream of the root's device and one per rank; ``None`` unless one backend serves all of them."""
    if root.type == "cpu":
        for device in ranks:
            if device.type != "cpu":
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
    for tensor in tensors[1:]:
        if memory_order(tensor) is not order:
            return None
    return order


def streams_of_cut(
    whole: torch.Tensor, parts: Tensors, dim: int, order: torch.memory_format
) -> tuple[Stream, list[Stream]] | None:
    """Return the streams of the whole and of its parts along ``dim``, all dense in ``order``; for scatter and gather.

    The whole may be on the host.  Not in pinned memory, which a GPU reads by itself: torch's copies know when such
    memory may be used again.  Nor in narrow strips of a GPU's memory, which torch's kernels copy faster.
    """
    devices = [part.device for part in parts]
    if whole.device.type == "cpu":
        streams = streams_of_root(whole.device, devices)
        if streams is not None or whole.is_pinned():
            return streams
    one, many = core_stream(whole.device), core_streams(devices)
    if one is None or many is None or devices[0].type == "cpu" or _is_narrow(whole, parts, dim, order):
        return None
    return one, many


def _is_narrow(whole: torch.Tensor, parts: Tensors, dim: int, order: torch.memory_format) -> bool:
    outer, inner = runs_along(whole.shape, dim, order)
    row_nbytes = inner * whole.itemsize
    narrowest = min(part.size(dim) for part in parts) * row_nbytes
    return outer > 1 and (narrowest < _NARROW_NBYTES or whole.size(dim) * row_nbytes > _WIDEST_PITCH)
