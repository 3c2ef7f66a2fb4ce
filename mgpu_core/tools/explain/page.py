"""The page: one HTML file with the trace inside, the player that animates it, and nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from mgpu_core.support.files import write_whole
from mgpu_core.tools.explain.batches import batches_of, inference_data
from mgpu_core.tools.explain.downsample import thinned
from mgpu_core.tools.explain.phases import rows_of
from mgpu_core.tools.explain.scene import us
from mgpu_core.tools.explain.scenes import scenes_of
from mgpu_core.tools.explain.steps import Recorded, Step
from mgpu_core.tools.explain.tables import (
    INFERENCE_LEGEND,
    inference_rows,
    legend,
    part_lines,
    phase_rows,
    pipeline_lines,
    seconds_of,
)
from mgpu_core.tools.explain.timeline import timelines_of
from mgpu_core.trace.events import ALL_RANKS, Parts, Span

__all__ = ["page_data", "page_of", "write_page"]

MOST_NBYTES = 1_000_000  # of the whole file
_DETAILS = (256, 64, 16, 4)  # how many of each thing a step has that is too large by itself


def write_page(trace: Recorded, path: Path) -> None:
    """Write :func:`page_of`, whole or not at all."""
    text = page_of(trace)
    write_whole(path, lambda file: file.write(text.encode()))


def page_of(trace: Recorded) -> str:
    """Return the page as text of at most a million bytes: of a longer trace the last steps, or less of the last one.

    Raises:
        ValueError: nothing was recorded; or a single thinned step is still too large.
    """
    if not trace.steps:
        raise ValueError("nothing was recorded: the page needs a forward pass, a step or a batch inside the block")
    data = page_data(trace)
    sizes = [_nbytes(step) for step in data["steps"]]
    room = MOST_NBYTES - len(_filled({**data, "left_out": len(sizes), "steps": []}).encode())
    fitting = sum(total <= room for total in accumulate(reversed(sizes)))
    first = len(sizes) - max(1, fitting)
    steps = data["steps"][first:] if fitting else [_less_of(data["steps"][-1], room)]
    return _filled({**data, "left_out": first, "steps": steps})


def _less_of(step: dict[str, Any], room: int) -> dict[str, Any]:
    for most in _DETAILS:
        less = thinned(step, most)
        if _nbytes(less) <= room:
            return less
    raise ValueError(
        f"the last step alone makes a page of more than {MOST_NBYTES} bytes: a trace (save_trace, --trace) has no "
        "limit; a larger bucket_nbytes or fewer ranks make the page smaller"
    )


def _nbytes(step: dict[str, Any]) -> int:
    """On the page, with its comma."""
    return len(_json(step).encode()) + 1


def page_data(trace: Recorded) -> dict[str, Any]:
    """Return the page's data of all steps."""
    return {
        "format": 1,
        "environment": trace.environment,
        "dropped": trace.dropped,
        "left_out": 0,
        "steps": list(map(_step_data, trace.steps)),
    }


def _json(data: Any) -> str:
    """Return JSON that cannot end the HTML element around it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _filled(data: dict[str, Any]) -> str:
    """Return the template, with style, player and trace."""
    folder = files("mgpu_core.tools.explain") / "player"
    text = (folder / "page.html").read_text(encoding="utf-8")
    for name, content in (
        ("style", (folder / "style.css").read_text(encoding="utf-8")),
        ("player", (folder / "player.js").read_text(encoding="utf-8")),
        ("trace", _json(data)),  # last: what it contains is not looked at again
    ):
        text = text.replace(f"/*{name}*/", content, 1)
    return text


def _step_data(step: Step) -> dict[str, Any]:
    batches = batches_of(step)
    rows = inference_rows(batches) if batches else phase_rows(step)
    return {
        "number": step.number,
        "name": step.name,
        "us": round(seconds_of(step) * 1e6, 3),
        "devices": list(step.devices),
        "scenes": scenes_of(step),
        "buckets": [
            {"bucket": contents.bucket, "names": list(contents.names), "nbytes": list(contents.nbytes)}
            for contents in sorted(step.contents.values(), key=lambda event: event.bucket)
        ],
        "lanes": [] if step.served else _lanes(step),
        "inference": inference_data(step),
        "pipelines": [each.data(step) | {"about": pipeline_lines(each)} for each in timelines_of(step)],
        "parts": [_parts_data(each) for each in step.parts],
        "table": rows,
        "legend": [INFERENCE_LEGEND] if batches else legend(rows),
        "left_out": "",
    }


def _parts_data(event: Parts) -> dict[str, Any]:
    parts = [{"device": str(device), "layers": names, "nbytes": nbytes} for device, names, nbytes in event.parts]
    return {"name": event.name, "about": part_lines(event)[1:], "parts": parts}


def _lanes(step: Step) -> list[dict[str, Any]]:
    """Return the lanes of the timeline: the host, each rank, and the collectives."""
    team = [span for span in rows_of(step.spans) if span.rank == ALL_RANKS]
    bars = [_bar(step, each.step, each.bucket, each.host_begin_ns, each.host_end_ns) for each in team]
    lanes = [{"name": "host", "bars": bars}]
    of_threads: dict[int, list[Span]] = {}
    for span in step.spans:
        of_threads.setdefault(span.thread, []).append(span)
    for rank, device in enumerate(step.devices):
        rank_spans = [span for span in step.spans if span.rank == rank]
        bars = [_bar(step, each.step, each.bucket, each.begin_ns, each.end_ns) for each in rank_spans]
        for bar, span in zip(bars, rank_spans, strict=True):
            if _is_in_turns(span, of_threads[span.thread]):
                bar["turns"] = 1
        kind = "stage" if step.schedules else "rank"
        lanes.append({"name": f"{kind} {rank} ({device or 'not seen'})", "bars": bars})
    calls = [
        _bar(step, call.operation, step.bucket_of(call), *times)
        for call in step.collectives
        for times in call.times.values()
    ]
    return [*lanes, {"name": "collectives", "bars": calls}]


def _is_in_turns(span: Span, of_thread: Sequence[Span]) -> bool:
    """Return whether a span of a rank has host time that lies beside that of other ranks, in its thread."""
    return span.device in ("", "cpu") and any(
        other.rank not in (span.rank, ALL_RANKS) and other.begin_ns < span.end_ns and span.begin_ns < other.end_ns
        for other in of_thread
    )


def _bar(step: Step, name: str, bucket: int, begin_ns: int, end_ns: int) -> dict[str, Any]:
    return {"name": name, "bucket": bucket, "begin": us(step, begin_ns), "end": us(step, end_ns)}
