"""The traffic of a collective, for a trace: the copies and sums that the core or the torch backend logged.

The log has pointers; a :class:`CollectiveTrace` knows the tensors of its collective, and turns each pointer into a
rank, a tensor and an offset.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.comm.layout import nbytes_of
from mgpu_core.devices.streams import HOST
from mgpu_core.trace import tracer
from mgpu_core.trace.buffer import TraceBuffer
from mgpu_core.trace.events import BETWEEN, ROOT, Address, Collective, Hop
from mgpu_core.trace.tracer import current_step, mark_devices, when_tracing

__all__ = ["CollectiveTrace", "discard_warmup", "trace_hop"]

Row: TypeAlias = Sequence[torch.Tensor | None]


class CollectiveTrace:
    """Over one collective call of this thread, while a recording is on: ask ``tracer.recording`` before making one.

    Args:
        operation: its name.
        rows: ``rows[i][rank]``, the tensors of the ranks, whose bytes are counted.
        roots: the whole tensors, or the root's.
        others: more tensors of the ranks, like ``rows``.
        ranks: the numbers of the ranks.
    """

    def __init__(
        self,
        operation: str,
        rows: Iterable[Row],
        roots: Sequence[torch.Tensor] = (),
        others: Sequence[Row] = (),
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._operation, self._rows, self._roots, self._others = operation, list(rows), roots, others
        self._ranks = range(max(map(len, self._rows), default=0)) if ranks is None else ranks
        self._route = ""

    def __enter__(self) -> CollectiveTrace:
        self._devices = [_device_of(self._column(index)) for index in range(len(self._ranks))]
        present = [each for each in self._devices if each is not None]
        self._before = mark_devices(present)
        self._begin_ns = time.perf_counter_ns()
        self._hops: list[_Record] = []
        _traces.stack = [*getattr(_traces, "stack", ()), self]
        _core.open_op_log()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        records = _core.close_op_log()
        _traces.stack.pop()
        if kind is None and self._before is not None:
            self._emit(records, time.perf_counter_ns(), *self._before)

    @when_tracing
    def _emit(
        self, records: Sequence[_core.OpRecord], end_ns: int, buffer: TraceBuffer, before: dict[str, object]
    ) -> None:
        after = mark_devices([each for each in self._devices if each is not None])
        finder = _Finder([*self._rows, *self._others], self._roots, self._ranks)
        hops = _hops(finder, records, 0)
        hops += _hops(finder, self._hops, max((hop.call for hop in hops), default=-1) + 1)
        self._keep(buffer, before, {} if after is None else after[1], tuple(hops), end_ns)

    def ran(self, route: str, roots: Sequence[torch.Tensor] = ()) -> None:
        """Note the algorithm that ran, and tensors that it allocated."""
        self._route = route
        self._roots = [*self._roots, *roots]

    def add(self, sums: bool, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Add a copy or sum of the torch backend."""
        now = time.perf_counter_ns()
        call = self._hops[-1].call + 1 if self._hops else 0
        # The bytes of a sparse part depend on its rank's indices, so each part is a separate hop.
        parts = [sources] if all(map(_is_strided, sources)) else [[source] for source in sources]
        for part in parts:
            ends = list(map(_pointer, part)), list(map(_pointer, targets))
            self._hops.append(_Record(sums, *ends, nbytes_of(part[0]), call, None, now, now))

    def _column(self, index: int) -> list[torch.Tensor]:
        column = [row[index] for row in self._rows if index < len(row)]
        return [each for each in column if each is not None]

    def _nbytes(self, index: int) -> int:
        """Return the bytes that a rank moves: none if its tensor is the root's own."""
        at_home = set(map(id, self._roots))
        return sum(nbytes_of(each) for each in self._column(index) if id(each) not in at_home)

    def _keep(
        self,
        buffer: TraceBuffer,
        before: dict[str, object],
        after: dict[str, object],
        hops: tuple[Hop, ...],
        end_ns: int,
    ) -> None:
        # Taken now: the tensors must not live as long as the recording.
        begin_ns, thread = self._begin_ns, threading.get_ident()
        operation, route, ranks = self._operation, self._route, tuple(self._ranks)
        nbytes = tuple(map(self._nbytes, range(len(ranks))))
        devices = tuple("" if each is None else str(each) for each in self._devices)
        buffer.add(
            current_step(),
            lambda clock: Collective(
                operation,
                route,
                ranks,
                nbytes,
                devices,
                hops,
                {
                    device: (begin_ns, end_ns)
                    if begin is None or after.get(device) is None
                    else (clock.ns(begin), clock.ns(after[device]))
                    for device, begin in before.items()
                },
                begin_ns,
                end_ns,
                thread,
            ),
        )


class _Record(NamedTuple):
    """A copy or sum of the torch backend; the fields of ``_core.OpRecord``."""

    is_sum: bool
    sources: list[int]
    targets: list[int]
    nbytes: int
    call: int
    stream: None
    begin_ns: int
    end_ns: int


_traces = threading.local()


def discard_warmup() -> None:
    """Drop the events of this thread's collective so far: they were a trial run of the tuner."""
    if getattr(_traces, "stack", ()):
        _core.open_op_log()


def trace_hop(sums: bool, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Record a copy or sum of the torch backend in a collective of this thread."""
    if tracer.recording is None:
        return
    stack = getattr(_traces, "stack", ())
    if stack and targets:
        stack[-1].add(sums, sources, targets)


def _hops(finder: _Finder, records: Sequence[_core.OpRecord | _Record], first_call: int) -> list[Hop]:
    addresses = finder.addresses
    return [
        Hop(
            record.is_sum,
            addresses(record.sources),
            addresses(record.targets),
            record.nbytes,
            first_call + record.call,
            _stream(record.stream),
            record.begin_ns,
            record.end_ns,
        )
        for record in records
    ]


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _pointer(tensor: torch.Tensor) -> int:
    """Return the tensor's address; a sparse one, several pieces of memory, has a number below all addresses."""
    return tensor.data_ptr() if _is_strided(tensor) else -id(tensor)


def _device_of(column: Sequence[torch.Tensor]) -> torch.device | None:
    return column[0].device if column else None


def _stream(stream: _core.Stream | None) -> str:
    if stream is None:
        return ""
    return "host" if stream == HOST else f"{stream.backend}:{stream.device} stream {stream.handle:#x}"


class _Finder:
    """Whose a pointer is: the innermost tensor's that holds it; roots come first, then ranks in their order."""

    def __init__(self, rows: Sequence[Row], roots: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
        self._blocks: dict[int, list[tuple[int, int, int]]] = {}  # begin -> end, rank, number
        for number, root in enumerate(roots):
            self._add(root, ROOT, number)
        for number, row in enumerate(rows):
            for rank, tensor in zip(ranks, row, strict=False):
                self._add(tensor, rank, number)
        self._begins = sorted(self._blocks)

    def _add(self, tensor: torch.Tensor | None, rank: int, number: int) -> None:
        if tensor is not None and (tensor.numel() or not _is_strided(tensor)):
            begin = _pointer(tensor)
            nbytes = nbytes_of(tensor) if _is_strided(tensor) else 1
            self._blocks.setdefault(begin, []).append((begin + nbytes, rank, number))

    def addresses(self, pointers: Sequence[int]) -> tuple[Address, ...]:
        """Return the tensor that holds each pointer; one that comes twice is of two tensors, if there are two."""
        met: dict[int, int] = {}
        addresses = []
        for pointer in pointers:
            addresses.append(self._address(pointer, met.get(pointer, 0)))
            met[pointer] = met.get(pointer, 0) + 1
        return tuple(addresses)

    def _address(self, pointer: int, before: int) -> Address:
        at = bisect_right(self._begins, pointer)
        for begin in reversed(self._begins[max(0, at - _OVERLAPPING) : at]):
            holding = [block for block in self._blocks[begin] if pointer < block[0]]
            if holding:
                _, rank, number = holding[min(before, len(holding) - 1)]
                return rank, number, pointer - begin
        return BETWEEN, 0, 0


_OVERLAPPING = 64  # tensors that begin before a pointer and are looked at: parts that lie in a whole
