"""The phases of a step: rows of the table, scenes of the page.

A phase is all spans of one name: the forwards of all ranks, the sums of all buckets.  Its time is the length of their
union, so ranks that work at once count once, and phases that overlap add up to more than the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mgpu_core.tools.explain.steps import CALLS, Step
from mgpu_core.trace.events import ALL_RANKS, Collective, Hop, Span
from mgpu_core.trace.tracer import WHOLE_STEPS

__all__ = [
    "AROUND",
    "SUMS",
    "UPDATE",
    "Interval",
    "Phase",
    "bus_gbps",
    "covered",
    "moved_by",
    "moved_nbytes",
    "outside",
    "phases_of",
    "rows_of",
]

Interval: TypeAlias = tuple[int, int]
"""Begin and end, ns."""

AROUND = (*WHOLE_STEPS, "apply")
"""Spans around others: what is in them has rows and bars of its own."""
UPDATE = ("update", "l2_norm", "check of gradients")
"""The optimizer, and the norm that it needs, to clip or to find gradients that are not finite."""
SUMS = ("all_reduce", "reduce", "reduce_scatter", "all_gather")
"""Of buckets."""
_WITH_OTHERS_INSIDE = "backward"  # buckets are summed in the middle of it


@dataclass(frozen=True, slots=True)
class Phase:
    """The work of a step under one name.

    Attributes:
        name: of its spans.
        spans: by their begin.
        collectives: that were made inside.
        times: of its spans, and of the devices' work for them after the host.
        seconds: that its spans cover together.
        share: of the step's time.
        moved_nbytes: bytes that moved between ranks.
        bus_gbps: bus bandwidth of the collectives, as nccl-tests defines it; ``None`` without any.
    """

    name: str
    spans: Sequence[Span]
    collectives: Sequence[Collective]
    times: Sequence[Interval]
    seconds: float
    share: float
    moved_nbytes: int
    bus_gbps: float | None

    @property
    def ranks(self) -> int:
        """How many ranks have a span of their own."""
        return len({span.rank for span in self.spans if span.rank != ALL_RANKS})


def phases_of(step: Step) -> list[Phase]:
    """Return the phases, in the order in which they began."""
    whole = step.end_ns - step.begin_ns
    rows = rows_of(step.spans) or list(step.spans)
    inside = _calls_by_row(rows, step.collectives)
    grouped: dict[str, list[Span]] = {}
    for span in rows:
        grouped.setdefault(span.step, []).append(span)
    return [_phase(name, spans, inside, whole) for name, spans in grouped.items()]


def outside(step: Step, phases: Sequence[Phase]) -> list[Phase]:
    """Return the time of the step that no phase covers, in parts by where it lies; parts of no length are left out."""
    whole = step.end_ns - step.begin_ns
    seen = [(max(begin, step.begin_ns), min(end, step.end_ns)) for each in phases for begin, end in each.times]
    reached, uncovered = covered(seen), []
    for name, (begin, end) in _outer_parts(step, phases).items():
        seen.append((begin, max(begin, end)))
        before, reached = reached, covered(seen)
        if rest := reached - before:
            uncovered.append(Phase(name, (), (), (), rest / 1e9, rest / whole, 0, None))
    return uncovered


def _outer_parts(step: Step, phases: Sequence[Phase]) -> dict[str, Interval]:
    """Return the parts of a step by name; where two overlap, the first counts."""
    calls = [(each.host_begin_ns, each.host_end_ns) for each in step.spans if each.step == step.name]
    nothing = step.begin_ns, step.begin_ns if step.name == CALLS else step.end_ns
    begin, end = calls[0] if calls else nothing
    forward = min((times[0] for each in phases if each.name == "forward" for times in each.times), default=begin)
    start = min((each.host_begin_ns for each in step.spans if each.step == "apply"), default=forward)
    last = max((times[1] for each in phases for times in each.times), default=begin)
    return {
        "preparing": (begin, min(start, forward)),
        "starting ranks": (start, forward),
        "between phases": (begin, min(end, last)),
        "after the last phase": (last, step.end_ns),
        "your script": (step.begin_ns, step.end_ns),
    }


def rows_of(spans: Sequence[Span]) -> list[Span]:
    """Return those that are not around others, and not inside another row of their thread."""
    rows: list[Span] = []
    last: dict[int, Span] = {}
    for span in sorted(spans, key=lambda event: (event.host_begin_ns, -event.host_end_ns)):
        if span.step in AROUND:
            continue
        before = last.get(span.thread)
        if before is not None and span.host_end_ns <= before.host_end_ns:
            continue
        rows.append(span)
        if span.step != _WITH_OTHERS_INSIDE:
            last[span.thread] = span
    return rows


def _calls_by_row(rows: Sequence[Span], calls: Sequence[Collective]) -> dict[Span, list[Collective]]:
    """Return the collectives of each row, found by thread and time.  Backward has none: those in it have rows."""
    by_thread: dict[int, list[Span]] = {}
    for row in rows:
        if row.step != _WITH_OTHERS_INSIDE:
            by_thread.setdefault(row.thread, []).append(row)
    calls_by_row: dict[Span, list[Collective]] = {row: [] for row in rows}
    for call in calls:
        mine = by_thread.get(call.thread, [])
        address = bisect_right(mine, call.host_begin_ns, key=lambda row: row.host_begin_ns) - 1
        if address >= 0 and call.host_end_ns <= mine[address].host_end_ns:
            calls_by_row[mine[address]].append(call)
    return calls_by_row


def _phase(name: str, spans: Sequence[Span], calls: dict[Span, list[Collective]], whole: int) -> Phase:
    inside = [call for span in spans for call in calls[span]]
    times = [time for span in spans for time in _times(span, calls[span])]
    together = covered(times)
    moved = sum(map(moved_nbytes, inside))
    share = together / whole if whole else 0.0
    return Phase(name, spans, inside, times, together / 1e9, share, moved, bus_gbps(inside))


def _times(span: Span, calls: Sequence[Collective]) -> list[Interval]:
    """Return the span's times; without device times, those of its collectives too, which may end after the host."""
    intervals = [(span.begin_ns, span.end_ns)]
    return intervals if span.device else intervals + [times for call in calls for times in call.times.values()]


def covered(times: Iterable[Interval]) -> int:
    """Return the length of the union of the intervals, in ns."""
    total, reached = 0, None
    for begin, end in sorted(times):
        if reached is None or begin > reached:
            total, reached = total + end - begin, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def moved_nbytes(call: Collective) -> int:
    """Return the bytes that moved between ranks: those that a hop reads or writes away from its first target."""
    return sum(map(moved_by, call.hops))


def moved_by(hop: Hop) -> int:
    """Return the same of one hop."""
    home = hop.targets[0][0]
    away = [address for address, _, _ in (*hop.sources, *hop.targets) if address != home]
    return hop.nbytes * len(away)


def bus_gbps(collectives: Sequence[Collective]) -> float | None:
    """Return the bus bandwidth, GB/s: bytes of a rank, times the factor of the operation, by the time of all calls.

    The factors are those of nccl-tests: 2 (n - 1) / n for all-reduce, (n - 1) / n for scatter, gather, all-gather and
    reduce-scatter (of all ranks' bytes), 1 for broadcast and reduce; so algorithms and team sizes can be compared.
    """
    carried = sum(map(_carried, collectives))
    taken_ns = covered(times for call in collectives for times in call.times.values())
    return carried / taken_ns if carried and taken_ns else None


def _carried(call: Collective) -> float:
    ranks = len(call.ranks)
    if ranks < 2:
        return 0.0
    if call.operation == "all_reduce":
        return max(call.nbytes) * 2 * (ranks - 1) / ranks
    if call.operation in ("broadcast", "reduce"):
        return max(call.nbytes)
    return sum(call.nbytes) * (ranks - 1) / ranks
