"""The norm of the same flat buffers, again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_core import _core
from mgpu_core.device.dtypes import FLOATING
from mgpu_core.device.streams import core_stream
from mgpu_core.kernels import reference
from mgpu_core.kernels.arguments import as_tensors, check_floating
from mgpu_core.kernels.ops import norm_dtype, pieces_of
from mgpu_core.record import span

__all__ = ["FlatNorm"]


class FlatNorm:
    """The Euclidean norm of all elements of many tensors together, as :func:`l2_norm`; they are looked at once.

    Args:
        tensors: float16, bfloat16, float32 or float64, of one dtype and device, contiguous.  Their memory must live as
            long as this.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = as_tensors(tensors, "tensors")
        first = self._tensors[0]
        check_floating("l2_norm", first.dtype)
        self._device = first.device
        self._pieces = pieces_of(self._tensors)
        tiles = max(1, _core.norm_tiles(self._pieces))
        self._partials = torch.empty(tiles, dtype=torch.float64, device=first.device)
        self._out = torch.empty((), dtype=norm_dtype(first.dtype), device=first.device)
        self._names = FLOATING[first.dtype], FLOATING[self._out.dtype]

    def compute(self) -> torch.Tensor:
        """The norm, on the current stream: a scalar of :func:`l2_norm`'s dtype, the same memory at every call."""
        stream = core_stream(self._device)
        with span("l2_norm"):
            if stream is None:
                return reference.l2_norm(self._tensors)
            name, wide = self._names
            _core.l2_norm(self._pieces, name, self._partials.data_ptr(), self._out.data_ptr(), wide, stream)
        return self._out
