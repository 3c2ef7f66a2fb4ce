"""The sums of the same many tensors, again and again: what gradients go through in every step.

Like ``dispatch.py``, for lists that are looked at once: where the sums go, and how they lie, never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from types import NoneType
from typing import TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.comm import backends, torch_backend
from mgpu_core.comm.reductions import CORE_DTYPES, core_count
from mgpu_core.comm.watch import hop, watched
from mgpu_core.device.memory import note_written
from mgpu_core.device.shared_memory import check_disjoint
from mgpu_core.device.streams import core_stream
from mgpu_core.device.tensor_checks import check_writable

__all__ = ["RankSums"]

Parts: TypeAlias = Sequence[torch.Tensor | None]


class RankSums:
    """The sums of the same many tensors, again and again; their outs are looked at once.

    Args:
        outs: where the sums go: dense, of one dtype and one device.
        ranks: whose tensors are added up, by their numbers in the team.
    """

    def __init__(self, outs: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
        check_writable(outs, "out {}".format)
        check_disjoint(outs, "out {}".format)
        self._outs, self._ranks = outs, ranks
        self._pointers = [out.data_ptr() for out in outs]
        self._shapes = [out.size() for out in outs]
        self._strides = [out.stride() for out in outs]
        self._counts = [core_count(out) for out in outs]
        self._dtype = CORE_DTYPES.get(outs[0].dtype)

    def add_up(self, columns: Sequence[Parts]) -> None:
        """Writes the sums of ``columns[rank][i]`` into ``outs[i]``; zeros where no rank has anything.

        ``None`` stands for a rank that adds nothing.  Parts that do not lie in memory as their out does, or that are
        sparse, are summed by torch.

        Raises:
            ValueError: a part has another shape than its out.
        """
        stream = core_stream(self._outs[0].device) if self._dtype is not None else None
        with watched("reduce", zip(*columns, strict=True), self._outs, ranks=self._ranks) as watch:
            if stream is None or not all(map(self._fits, columns)):
                self._add_up_elsewhere(columns)
                watch.ran(torch_backend.ALGORITHM)
            else:
                self._add_up_in_core(list(map(_pointers, columns)), stream)
                watch.ran("direct")
        note_written(self._outs)

    def _fits(self, column: Parts) -> bool:
        """Whether the core may add these element by element: plain tensors beside the outs, with their strides."""
        present, shapes, strides = column, self._shapes, self._strides
        kinds = set(map(type, column))
        if NoneType in kinds:
            kinds.remove(NoneType)
            present = [part for part in column if part is not None]
            there = [part is not None for part in column]
            shapes, strides = list(compress(shapes, there)), list(compress(strides, there))
        found: list[torch.Tensor] = present  # type: ignore[assignment]
        first = self._outs[0]
        return (
            kinds <= {torch.Tensor}
            and set(map(_kind, found)) <= {_kind(first)}
            and list(map(torch.Tensor.size, found)) == shapes
            and list(map(torch.Tensor.stride, found)) == strides
            and not any(map(torch.Tensor.is_neg, found))
            and not (first.is_complex() and any(map(torch.Tensor.is_conj, found)))
        )

    def _add_up_in_core(self, pointers: Sequence[Sequence[int]], stream: backends.Stream) -> None:
        assert self._dtype is not None
        rows, outs, counts = list(map(list, zip(*pointers, strict=True))), self._pointers, self._counts
        if not all(map(any, rows)):  # of some no rank has anything
            there = [i for i, row in enumerate(rows) if any(row)]
            for i in set(range(len(rows))).difference(there):
                self._outs[i].zero_()
            rows, outs, counts = [rows[i] for i in there], [outs[i] for i in there], [counts[i] for i in there]
        _core.reduce(rows, outs, counts, self._dtype, "sum", [stream] * len(pointers), stream)

    def _add_up_elsewhere(self, columns: Sequence[Parts]) -> None:
        for out, *parts in zip(self._outs, *columns, strict=True):
            if all(part is None for part in parts):
                out.zero_()
                continue
            if any(part is not None and part.shape != out.shape for part in parts):
                raise ValueError(f"a tensor of another shape cannot be added up into one of {tuple(out.shape)}")
            total = torch_backend.reduce(parts, "sum", out.device)
            out.copy_(total if total.layout is torch.strided else total.to_dense())
            hop(False, [total], [out])


_kind = attrgetter("layout", "dtype", "device")


def _pointers(column: Parts) -> list[int]:
    """Null, where a rank adds nothing."""
    if NoneType not in set(map(type, column)):
        return list(map(torch.Tensor.data_ptr, column))  # type: ignore[arg-type]
    return [0 if part is None else part.data_ptr() for part in column]
