"""Sums of the same tensors over all ranks, repeated in every step: the reduction of gradients.

Like ``dispatch.py``, for lists that are looked at once: where the sums go, and how they lie, never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.comm import torch_backend
from mgpu_core.comm.reductions import CORE_DTYPES, core_count
from mgpu_core.comm.traffic_trace import CollectiveTrace, trace_hop
from mgpu_core.devices.memory import note_written
from mgpu_core.devices.shared_memory import check_disjoint
from mgpu_core.devices.streams import HOST, core_stream
from mgpu_core.devices.tensor_checks import LiesLike, check_writable
from mgpu_core.trace import tracer

__all__ = ["RankSums"]

Parts: TypeAlias = Sequence[torch.Tensor | None]


class RankSums:
    """The sums of the same many tensors, again and again; their outs are looked at once.

    Args:
        outs: where the sums go: dense, of one dtype and one device.
        ranks: whose tensors are added up, by their numbers in the team.
        are_absent: the outs have memory during the sums alone.
    """

    def __init__(self, outs: Sequence[torch.Tensor], ranks: Sequence[int], *, are_absent: bool = False) -> None:
        check_writable(outs, "out {}".format)
        self._outs, self._ranks, self._are_absent = outs, ranks, are_absent
        if not are_absent:
            check_disjoint(outs, "out {}".format)
            self._pointers = [out.data_ptr() for out in outs]
        self._like = LiesLike(outs)
        self._counts = [core_count(out) for out in outs]
        self._dtype, self._device = CORE_DTYPES.get(outs[0].dtype), outs[0].device
        self._is_on_host = self._dtype is not None and self._device.type == "cpu"

    def add_up(self, columns: Sequence[Parts]) -> None:
        """Write the sums of ``columns[rank][i]`` into ``outs[i]``; zeros where no rank has anything.

        ``None`` stands for a rank that adds nothing.  Parts that do not lie in memory as their out does, or that are
        sparse, are summed by torch.

        Raises:
            ValueError: a part has another shape than its out.
        """
        if tracer.recording is None:
            self._add_up(columns)
        else:
            with CollectiveTrace("reduce", zip(*columns, strict=True), self._outs, ranks=self._ranks) as call:
                call.ran(self._add_up(columns))
        note_written(self._outs)

    def _add_up(self, columns: Sequence[Parts]) -> str:
        """Do so, and return the algorithm that ran."""
        stream = HOST if self._is_on_host else core_stream(self._device) if self._dtype is not None else None
        if stream is None or not self._like.holds_for_all(columns):
            self._add_up_elsewhere(columns)
            return torch_backend.ALGORITHM
        assert self._dtype is not None  # for such a dtype there is no stream
        pointers = list(map(_pointers, columns))
        if self._are_absent:
            self._pointers = list(map(torch.Tensor.data_ptr, self._outs))
        rows, outs, counts = list(map(list, zip(*pointers, strict=True))), self._pointers, self._counts
        if not all(map(any, rows)):  # of some no rank has anything
            there = [i for i, row in enumerate(rows) if any(row)]
            for i in set(range(len(rows))).difference(there):
                self._outs[i].zero_()
            rows, outs, counts = [rows[i] for i in there], [outs[i] for i in there], [counts[i] for i in there]
        _core.reduce(rows, outs, counts, self._dtype, "sum", [stream] * len(pointers), stream)
        return "direct"

    def _add_up_elsewhere(self, columns: Sequence[Parts]) -> None:
        for out, *parts in zip(self._outs, *columns, strict=True):
            if all(part is None for part in parts):
                out.zero_()
                continue
            if any(part is not None and part.shape != out.shape for part in parts):
                raise ValueError(f"a tensor of another shape cannot be added up into one of {tuple(out.shape)}")
            total = torch_backend.reduce(parts, "sum", out.device)
            out.copy_(total if total.layout is torch.strided else total.to_dense())
            trace_hop(False, [total], [out])


def _pointers(column: Parts) -> list[int]:
    """Null, where a rank adds nothing."""
    if NoneType not in set(map(type, column)):
        return list(map(torch.Tensor.data_ptr, column))  # type: ignore[arg-type]
    return [0 if part is None else part.data_ptr() for part in column]
