"""How a tensor lies in memory, as far as the core needs to know.

The core moves dense blocks.  A tensor is one when its elements fill a range without gaps, in whatever order of
dimensions: contiguous, or channels_last.  Cut along a dimension, it is ``outer`` runs of ``rows`` times ``inner``
elements (see csrc/core/transfer.h); a part in the same order of dimensions is dense too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch._C import _dispatch_keys

from mgpu_core.devices.tensor_checks import plain_keys

__all__ = ["are_blocks", "is_dense", "memory_order", "nbytes_of", "one_layout", "runs_along"]

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


def are_blocks(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all of these are contiguous memory, none of it a lazy view, sparse or inside a transform."""
    kind, plain = "", frozenset[int]()
    for each in tensors:
        if each.device.type != kind:
            kind = each.device.type
            plain = plain_keys(kind)
        if _dispatch_keys(each).raw_repr() not in plain or not each.is_contiguous():
            return False
    return True


def one_layout(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors of one shape are dense and hold their elements in one order: bytes match elements."""
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
    for each in dims[:position]:
        outer *= shape[each]
    for each in dims[position + 1 :]:
        inner *= shape[each]
    return outer, inner
