"""What a recording is made of: facts, as they were seen.

Spans took time, cuts say which rows are whose, collectives say which bytes went where, contents what a bucket holds,
marks are moments.  All times are ns of ``time.perf_counter_ns``; those of work on a GPU are the GPU's own, by events,
put on the same axis.  Each says of which whole step it is part; ``NO_STEP``: of none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "ALL_RANKS",
    "BETWEEN",
    "GATHER_BACK",
    "NO_BUCKET",
    "NO_STEP",
    "ROOT",
    "SCATTER_BACK",
    "Collective",
    "Contents",
    "Cut",
    "Entry",
    "Hop",
    "Mark",
    "Place",
    "Span",
]

ALL_RANKS = -1
NO_BUCKET = -1
NO_STEP = 0
SCATTER_BACK, GATHER_BACK = "scatter (backward)", "gather (backward)"
ROOT = -1
BETWEEN = -2

Place: TypeAlias = tuple[int, int, int]
"""Where bytes are: rank (``ROOT``: the whole tensor, or the root's; ``BETWEEN``: nobody's memory), number of the tensor
in its collective, offset in bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time; on a GPU by its own events.

    Attributes:
        step: its name.
        rank: whose work; ``ALL_RANKS``.
        bucket: what it is about; ``NO_BUCKET``.
        device: where the work ran, as text; empty: on the host.
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
    """A tensor that was cut into the ranks' rows, or joined from them.

    Attributes:
        step: ``scatter`` or ``gather``; with ``(backward)`` behind it, of gradients.
        name: what the tensor is called: ``inputs[0]``.
        counts: rows of each rank along ``dim``, first rank first.
        shapes: of each rank's part.
        route: ``view`` (no byte moves), ``copy``, ``copies`` (all rows to every rank) or ``whole`` (one rank).
        source: where the whole tensor is.
        devices: of the ranks.
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
    """A copy (one source), or a sum of its sources in their order; the result goes to each target.

    Attributes:
        nbytes: of each source and of each target.
        call: hops of one call were given to the device together.
    """

    sums: bool
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]
    nbytes: int
    call: int
    stream: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One call over the team, with all that it moved.

    Attributes:
        operation: as the counters name it.
        route: the algorithm, or ``generic``.
        ranks: who took part, by their numbers in the team.
        nbytes: of each of them.
        devices: of each of them.
        hops: in order; empty where a library does not tell (NCCL).
        times: per device when the work began and ended there.
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
    """What a bucket is made of."""

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


Entry: TypeAlias = Span | Cut | Collective | Contents | Mark
