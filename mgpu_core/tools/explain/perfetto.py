"""Write a trace in the format that Perfetto and Chrome read: a track per rank, per stream and per host thread.

The format is Google's "Trace Event Format": complete events ("X") with times in microseconds, and instants ("i").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mgpu_core.support.files import write_whole
from mgpu_core.tools.explain.phases import moved_nbytes
from mgpu_core.tools.explain.steps import Recorded
from mgpu_core.trace.events import ALL_RANKS, NO_BUCKET, Collective, Event, Mark, Served, Span

__all__ = ["trace_of", "write_trace"]

_RANKS, _STREAMS, _HOST = 1, 2, 3  # processes of the trace
_GROUPS = {_RANKS: "ranks", _STREAMS: "streams", _HOST: "host"}


def write_trace(trace: Recorded, path: Path) -> None:
    """Write :func:`trace_of` as JSON, whole or not at all."""
    text = json.dumps(trace_of(trace), separators=(",", ":"))
    write_whole(path, lambda file: file.write(text.encode()))


def trace_of(trace: Recorded) -> dict[str, Any]:
    """Return the trace as one JSON object."""
    tracks = _Tracks()
    recorded: list[Event] = []
    for step in trace.steps:
        recorded += [*step.spans, *step.collectives, *step.marks, *step.served]
    begin = min((step.begin_ns for step in trace.steps), default=0)
    events = [each for event in recorded for each in _track_events(event, tracks, begin)]
    return {"traceEvents": [*tracks.names(), *events], "displayTimeUnit": "ns", "otherData": trace.environment}


class _Tracks:
    """Number tracks in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def of(self, group: int, name: str) -> dict[str, int]:
        """Return the fields that put an event on the track."""
        return {"pid": group, "tid": self._numbers.setdefault((group, name), len(self._numbers))}

    def names(self) -> Iterator[dict[str, Any]]:
        """Yield the events that name the tracks."""
        for group, name in _GROUPS.items():
            yield {"ph": "M", "name": "process_name", "pid": group, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": group, "tid": 0, "args": {"sort_index": group}}
        for (group, name), number in self._numbers.items():
            yield {"ph": "M", "name": "thread_name", "pid": group, "tid": number, "args": {"name": name}}


def _track_events(event: Event, tracks: _Tracks, begin: int) -> Iterator[dict[str, Any]]:
    if isinstance(event, Span):
        yield _of_span(event, tracks, begin)
    elif isinstance(event, Collective):
        yield from _of_collective(event, tracks, begin)
    elif isinstance(event, Mark):
        args = {"text": event.text} | _bucket(event.bucket)
        instant = {"ph": "i", "s": "t", "name": event.step, "ts": (event.at_ns - begin) / 1e3, "args": args}
        yield instant | _track(tracks, event)
    elif isinstance(event, Served):
        what = {"rows": event.rows, "requests": event.requests, "waited_us": event.waited_ns / 1e3}
        instant = {"ph": "i", "s": "t", "name": "joined", "ts": (event.host_begin_ns - begin) / 1e3, "args": what}
        yield instant | _track(tracks, event)


def _track(tracks: _Tracks, event: Span | Mark | Served) -> dict[str, int]:
    is_host = event.rank == ALL_RANKS
    return tracks.of(_HOST, f"thread {event.thread}") if is_host else tracks.of(_RANKS, f"rank {event.rank}")


def _bucket(bucket: int) -> dict[str, int]:
    return {} if bucket == NO_BUCKET else {"bucket": bucket}


def _complete(name: str, begin_ns: int, end_ns: int, begin: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": (begin_ns - begin) / 1e3, "dur": (end_ns - begin_ns) / 1e3, "args": args}


def _of_span(span: Span, tracks: _Tracks, begin: int) -> dict[str, Any]:
    args = _bucket(span.bucket) | ({"device": span.device} if span.device else {})
    on_host = span.rank == ALL_RANKS
    times = (span.host_begin_ns, span.host_end_ns) if on_host else (span.begin_ns, span.end_ns)
    return _complete(span.step, *times, begin, args) | _track(tracks, span)


def _of_collective(call: Collective, tracks: _Tracks, begin: int) -> Iterator[dict[str, Any]]:
    args = {"route": call.route, "ranks": call.ranks, "nbytes": call.nbytes, "moved": moved_nbytes(call)}
    for device, (start, end) in call.times.items():
        yield _complete(call.operation, start, end, begin, args) | tracks.of(_STREAMS, f"{device} {call.operation}")
    for hop in call.hops:
        what = {"from": hop.sources, "to": hop.targets, "nbytes": hop.nbytes, "call": hop.call}
        name = "sum" if hop.sums else "copy"
        yield _complete(name, hop.begin_ns, hop.end_ns, begin, what) | tracks.of(_STREAMS, hop.stream or "generic")
