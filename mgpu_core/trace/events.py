"""The events of a trace.

Spans took time, cuts map rows to ranks, collectives moved bytes, contents list the tensors of a bucket, parts say
where layers are, marks are moments.  All times are in ns of ``time.perf_counter_ns``; those of work on a GPU come from
CUDA events and are put on the same axis.  ``whole_step`` is the number of the step that the event belongs to;
``NO_STEP``: to none; ``INFERENCE``: to the batches of predictors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = [
    "ALL_RANKS",
    "BETWEEN",
    "GATHER_BACK",
    "INFERENCE",
    "NO_BUCKET",
    "NO_STEP",
    "ROOT",
    "SCATTER_BACK",
    "Collective",
    "Contents",
    "Cut",
    "Event",
    "Hop",
    "Mark",
    "Address",
    "Parts",
    "Schedule",
    "Served",
    "Span",
]

ALL_RANKS = -1
NO_BUCKET = -1
NO_STEP = 0
INFERENCE = -1
SCATTER_BACK, GATHER_BACK = "scatter (backward)", "gather (backward)"
ROOT = -1
BETWEEN = -2

Address: TypeAlias = tuple[int, int, int]
"""An address: rank (``ROOT``: the whole tensor or the root's; ``BETWEEN``: staging memory), index of the tensor in its
collective, offset in bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """A phase that took time; on a GPU measured by CUDA events.

    Attributes:
        step: the name of the phase.
        rank: the rank that worked, or ``ALL_RANKS``.
        bucket: the index of the bucket, or ``NO_BUCKET``.
        device: the device of the work, as text; empty: the host.
        host_begin_ns, host_end_ns: when the thread entered and left it.
    """

    step: str
    rank: int
    bucket: int
    device: str
    begin_ns: int
    end_ns: int
    host_begin_ns: int
    host_end_ns: int
    thread: int
    whole_step: int = NO_STEP


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor that was cut into one part per rank, or joined from such parts.

    Attributes:
        step: ``scatter`` or ``gather``; followed by ``(backward)`` for gradients.
        name: the path of the tensor: ``inputs[0]``.
        counts: rows of each rank along ``dim``, first rank first.
        shapes: of each rank's part.
        route: ``view`` (no byte moves), ``copy``, ``copies`` (all rows to every rank) or ``whole`` (one rank).
        source: the device of the whole tensor.
        devices: of the parts.
    """

    step: str
    name: str
    dim: int
    counts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    nbytes: tuple[int, ...]
    route: str
    source: str
    devices: tuple[str, ...]
    host_begin_ns: int
    thread: int
    whole_step: int = NO_STEP


@dataclass(frozen=True, slots=True)
class Hop:
    """A copy (one source), or a sum of sources in their order, into each target.

    Attributes:
        nbytes: of each source and of each target.
        call: hops with the same number were launched together.
    """

    sums: bool
    sources: tuple[Address, ...]
    targets: tuple[Address, ...]
    nbytes: int
    call: int
    stream: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call, with the bytes that it moved.

    Attributes:
        operation: as the counters name it.
        route: the algorithm, or ``generic``.
        ranks: the ranks that took part.
        nbytes: per rank.
        devices: per rank.
        hops: in order; empty where the library does not report them (NCCL, push).
        times: begin and end of the work, per device.
    """

    operation: str
    route: str
    ranks: tuple[int, ...]
    nbytes: tuple[int, ...]
    devices: tuple[str, ...]
    hops: tuple[Hop, ...]
    times: dict[str, tuple[int, int]]
    host_begin_ns: int
    host_end_ns: int
    thread: int
    whole_step: int = NO_STEP


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors of a bucket."""

    step: str
    bucket: int
    names: tuple[str, ...]
    nbytes: tuple[int, ...]
    host_begin_ns: int
    thread: int
    whole_step: int = NO_STEP


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: ``ready`` (a rank has its gradients of a bucket), ``backward`` (a rank's gradient has arrived), ..."""

    step: str
    rank: int
    bucket: int
    text: str
    at_ns: int
    host_begin_ns: int
    thread: int
    whole_step: int = NO_STEP


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan of one run of a pipeline; its spans ``forward`` and ``backward`` have stages as ranks.

    Attributes:
        actions: ``(slot, stage, "forward" or "backward", micro-batch)`` each.
        workers: of each stage, by index; a worker runs one action at a time.
        borders: ``(stage, stage that reads, bytes forward, bytes backward)`` of all micro-batches.
    """

    actions: tuple[tuple[int, int, str, int], ...]
    workers: tuple[int, ...]
    borders: tuple[tuple[int, int, int, int], ...]
    host_begin_ns: int
    thread: int
    whole_step: int = NO_STEP


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the layers of a module are that ``place`` or a Pipeline has spread, at a call of it.

    Attributes:
        placement: the id of the placement, the same in every call.
        name: of the module's class.
        parts: ``(device, names of its layers, bytes of the tensors that are at home there)`` each.
    """

    placement: int
    name: str
    parts: tuple[tuple[torch.device, tuple[str, ...], int], ...]
    host_begin_ns: int
    thread: int
    whole_step: int = NO_STEP


@dataclass(frozen=True, slots=True)
class Served:
    """A batch of a predictor, emitted inside its span ``batch``, which has the times.

    Attributes:
        predictor: its number, unique in the process.
        devices: of all its ranks, as text.
        requests: how many were joined.
        waited_ns: how long the oldest of them had been in the queue.
    """

    predictor: int
    rank: int
    devices: tuple[str, ...]
    rows: int
    requests: int
    waited_ns: int
    host_begin_ns: int
    thread: int
    whole_step: int = NO_STEP


Event: TypeAlias = Span | Cut | Collective | Contents | Mark | Parts | Schedule | Served
