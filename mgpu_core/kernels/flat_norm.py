"""The norm of many tensors: of the same ones again and again by :class:`FlatNorm`, once by the function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.devices.dtypes import FLOATING
from mgpu_core.devices.streams import HOST, core_stream
from mgpu_core.kernels import reference
from mgpu_core.kernels.tensor_arguments import check_floating, with_memory
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer

__all__ = ["FlatNorm", "l2_norm"]


class FlatNorm:
    """The Euclidean norm of all elements of many tensors together, as :func:`l2_norm`; they are looked at once.

    Args:
        tensors: float16, bfloat16, float32 or float64, of one dtype and device, contiguous.  Their memory must live as
            long as this.
        keeps: keep the tensors; otherwise :meth:`compute` is always given others, and they show how those lie.
    """

    def __init__(self, tensors: Sequence[Any], *, keeps: bool = True) -> None:
        self._tensors, pointers, self._counts = with_memory(tensors, "tensors")
        first = self._tensors[0]
        check_floating("l2_norm", first.dtype)
        self._device, self._is_on_host = first.device, first.device.type == "cpu"
        self._pieces = _core.Pieces(pointers, self._counts, FLOATING[first.dtype])
        tiles = max(1, _core.norm_tiles(self._pieces))
        self._partials = torch.empty(tiles + 1, dtype=torch.float64, device=first.device)
        self._counter = self._partials[tiles:].zero_()  # of a GPU's blocks; each norm leaves it at 0
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        self._out = torch.empty((), dtype=wide, device=first.device)
        self._names = FLOATING[first.dtype], FLOATING[self._out.dtype]
        if not keeps:
            self._tensors = []

    def compute(self, instead: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Return the norm, computed on the current stream: a scalar of :func:`l2_norm`'s dtype.

        It lies in the same memory at every call.

        Args:
            instead: the norm of these, which lie as the tensors do, each in memory of its own.
        """
        stream = HOST if self._is_on_host else core_stream(self._device)
        with tracer.span("l2_norm") if tracer.sink else NULL_CONTEXT:
            if stream is None:
                return reference.l2_norm(self._tensors if instead is None else instead)
            name, wide = self._names
            pieces = self._pieces
            if instead is not None:
                pieces = _core.Pieces(list(map(torch.Tensor.data_ptr, instead)), self._counts, name)
            try:
                _core.l2_norm(pieces, self._partials.data_ptr(), self._out.data_ptr(), wide, stream)
            except BaseException:
                self._counter.zero_()  # some of its launches may have been made
                raise
        return self._out


def l2_norm(tensors: Sequence[Any]) -> torch.Tensor:
    """Return the Euclidean norm of all elements of many tensors together, as one number that stays on the device.

    Args:
        tensors: float16, bfloat16, float32 or float64, of one dtype and device.

    Returns:
        A scalar, float32 (float64 of float64 tensors).  Squares are added up in float64, on a GPU each thread's of
        narrower dtypes in pairs of float32 (about 44 bits), in an order that depends on the sizes alone: the same bits
        in every run.
    """
    return FlatNorm(tensors).compute()
