"""A story as a trace in the format that Perfetto and Chrome read: a track per rank, per stream and per host thread.

The format is Google's "Trace Event Format": complete events ("X") with times in microseconds, and instants ("i").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mgpu_core.entries import ALL_RANKS, NO_BUCKET, Collective, Entry, Mark, Span
from mgpu_core.explain.phases import moved_nbytes
from mgpu_core.explain.story import Story
from mgpu_core.files import write_whole

__all__ = ["trace_of", "write_trace"]

_RANKS, _STREAMS, _HOST = 1, 2, 3  # processes of the trace
_GROUPS = {_RANKS: "ranks", _STREAMS: "streams", _HOST: "host"}


def write_trace(story: Story, path: Path) -> None:
    """Write :func:`trace_of` as JSON, whole or not at all."""
    text = json.dumps(trace_of(story), separators=(",", ":"))
    write_whole(path, lambda file: file.write(text.encode()))


def trace_of(story: Story) -> dict[str, Any]:
    """Return the story as one JSON object."""
    tracks = _Tracks()
    entries: list[Entry] = []
    for step in story.steps:
        entries += [*step.spans, *step.collectives, *step.marks]
    begin = min((step.begin_ns for step in story.steps), default=0)
    events = [event for entry in entries for event in _events(entry, tracks, begin)]
    return {"traceEvents": [*tracks.names(), *events], "displayTimeUnit": "ns", "otherData": story.environment}


class _Tracks:
    """Numbers for tracks: their place is the order in which they were first asked for."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def of(self, group: int, name: str) -> dict[str, int]:
        """Return what puts an event on the track."""
        return {"pid": group, "tid": self._numbers.setdefault((group, name), len(self._numbers))}

    def names(self) -> Iterator[dict[str, Any]]:
        """Events that name the tracks."""
        for group, name in _GROUPS.items():
            yield {"ph": "M", "name": "process_name", "pid": group, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": group, "tid": 0, "args": {"sort_index": group}}
        for (group, name), number in self._numbers.items():
            yield {"ph": "M", "name": "thread_name", "pid": group, "tid": number, "args": {"name": name}}


def _events(entry: Entry, tracks: _Tracks, begin: int) -> Iterator[dict[str, Any]]:
    if isinstance(entry, Span):
        yield _of_span(entry, tracks, begin)
    elif isinstance(entry, Collective):
        yield from _of_collective(entry, tracks, begin)
    elif isinstance(entry, Mark):
        args = {"text": entry.text} | _bucket(entry.bucket)
        event = {"ph": "i", "s": "t", "name": entry.step, "ts": (entry.at_ns - begin) / 1e3, "args": args}
        yield event | _track(tracks, entry)


def _track(tracks: _Tracks, entry: Span | Mark) -> dict[str, int]:
    is_host = entry.rank == ALL_RANKS
    return tracks.of(_HOST, f"thread {entry.thread}") if is_host else tracks.of(_RANKS, f"rank {entry.rank}")


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
