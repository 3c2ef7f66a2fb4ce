"""Which span a moment lies in, without looking at all of them: of each name and thread the outermost ones, in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import attrgetter

from mgpu_core.trace.events import Span

__all__ = ["Enclosing"]

_begin = attrgetter("host_begin_ns")


class Enclosing:
    """The spans of a step, to be asked again and again."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._rows: dict[tuple[int, str], list[Span]] = {}
        for span in sorted(spans, key=lambda event: (event.host_begin_ns, -event.host_end_ns)):
            row = self._rows.setdefault((span.thread, span.step), [])
            if not row or span.host_begin_ns > row[-1].host_end_ns:
                row.append(span)

    def span(self, thread: int, step: str, host_ns: int) -> Span | None:
        """Return the outermost span of this name around a moment of the thread."""
        row = self._rows.get((thread, step), [])
        index = bisect_right(row, host_ns, key=_begin) - 1
        return row[index] if index >= 0 and host_ns <= row[index].host_end_ns else None
