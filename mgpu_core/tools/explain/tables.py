"""A step as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from mgpu_core.pipeline.placement import PlacedPart
from mgpu_core.support.tables import Lines, Table, human_nbytes, human_seconds
from mgpu_core.tools.explain.batches import BatchRun, batches_of, served_times, servers_of
from mgpu_core.tools.explain.phases import Phase, outside, phases_of
from mgpu_core.tools.explain.scene import plural
from mgpu_core.tools.explain.steps import Step
from mgpu_core.tools.explain.timeline import Timeline, timelines_of
from mgpu_core.trace.events import Parts

__all__ = [
    "INFERENCE_LEGEND",
    "inference_rows",
    "inference_table",
    "legend",
    "part_lines",
    "phase_rows",
    "pipeline_lines",
    "seconds_of",
    "table",
]


def table(step: Step, environment: Mapping[str, str], dropped: int = 0) -> Lines:
    """Return a header, a table with a line per phase, and a legend.

    A step of batches has no phases: :func:`inference_table` has its numbers.
    """
    ranks = plural(len(step.devices), "stage" if step.schedules else "rank")
    devices = ", ".join(device or "not seen" for device in step.devices)
    team = f" {ranks} ({devices})," if devices else ""
    lines: list[str | Table] = [
        f"recorded step {step.number}: {step.name},{team} {human_seconds(seconds_of(step))}",
        *([_WORKERS[step.workers]] if step.workers else []),
        *(f"{name}: {value}" for name, value in environment.items()),
    ]
    if not batches_of(step):
        rows = phase_rows(step)
        lines += ["", Table(rows)]
        for timeline in timelines_of(step):
            lines += ["", *pipeline_lines(timeline)]
        lines += ["", *legend(rows)]
    for parts in step.parts:
        lines += ["", *part_lines(parts)]
    if dropped:
        lines.append(f"{dropped} events more were too many to keep: the last step may be a part of one.")
    return lines


def seconds_of(step: Step) -> float:
    """Return the time from a step's begin, or a predictor's first request, to its end."""
    batches = batches_of(step)
    begin, end = served_times(batches) if batches else (step.begin_ns, step.end_ns)
    return (end - begin) / 1e9


def phase_rows(step: Step) -> list[tuple[str, ...]]:
    """Return the cells of :func:`table`, with a header: a row per phase, and below them the time in no phase.

    Columns without a value are left out.
    """
    phases = phases_of(step)
    shown = [*phases, *outside(step, phases)]
    rows = [_HEAD, *map(_cells, shown)]
    kept = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]
    return list(zip(*kept, strict=True))


def legend(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line on each column and row of :func:`phase_rows` that does not explain itself."""
    shown = {*rows[0], *(row[0] for row in rows)}
    return [f"{name}: {about}." for name, about in _ABOUT.items() if name in shown]


def pipeline_lines(run: Timeline) -> list[str]:
    """Return the idle share of a pipeline's run, and the bytes that crossed each border."""
    micro_batches = 1 + max(each[3] for each in run.schedule.actions)
    return [
        f"pipeline: {plural(len(run.schedule.workers), 'stage')}, {micro_batches} micro-batches; "
        f"idle {run.idle:.1%} of the stages' time from the first action to the last, {run.bubble:.1%} by the schedule",
        *(
            f"stage {a} to stage {b}: {human_nbytes(there)} forward, {human_nbytes(back)} backward"
            for a, b, there, back in run.schedule.borders
        ),
    ]


def part_lines(event: Parts) -> list[str]:
    """Return a line per part of a module: its device, its layers, and its bytes."""
    return [f"parts of {event.name}:", *(f"  {PlacedPart(*part)}" for part in event.parts)]


def inference_table(batches: list[BatchRun]) -> Lines:
    """Return a line per rank of a predictor: batches, the wait of the oldest request of each, idle share."""
    return ["", Table(inference_rows(batches)), INFERENCE_LEGEND] if batches else []


def inference_rows(batches: list[BatchRun]) -> list[list[str]]:
    """Return the cells of :func:`inference_table`, with a header."""
    rows = [["inference", "batches", "requests", "rows", "rows a batch", "time", "oldest waited", "at most", "idle"]]
    for server in servers_of(batches):
        runs = server.batches
        count, waits = sum(each.rows for each in runs), [each.waited_ns / 1e9 for each in runs]
        times = [(each.end_ns - each.begin_ns) / 1e9 for each in runs]
        seconds = [human_seconds(each) for each in (median(times), median(waits), max(waits))] if runs else ["-"] * 3
        mean = f"{count / len(runs):.1f}" if runs else "-"
        numbers = map(str, (len(runs), sum(each.requests for each in runs), count))
        rows.append([server.name, *numbers, mean, *seconds, f"{server.idle:.1%}"])
    return rows


_WORKERS = {
    "threads": "workers: threads (each rank ran in its own thread)",
    "caller": "workers: caller (all ranks ran one after the other in the caller's thread)",
}
_HEAD = ("phase", "ranks", "calls", "moved", "time", "share", "bus GB/s")
INFERENCE_LEGEND = (
    "time: of a batch, median.  oldest waited: the oldest request of a batch, in the queue, median and most."
)
_ABOUT = {
    "time": "covered by the phase's spans; phases overlap, so shares may add up to more than 100 %",
    "bus GB/s": "bytes of a rank x the operation's factor (2(n-1)/n for all_reduce) / time of the calls",
    "meet": "the ranks join the gradients of a cut layer",
    "l2_norm": "the norm of all gradients, for clip_norm",
    "check of gradients": "whether all of them are finite; error_if_nonfinite=False leaves it out",
    "preparing": "no phase; mgpu_core reads the module and sets the ranks up",
    "starting ranks": "no phase; the ranks' threads wake, until the first forward begins",
    "between phases": "no phase; Python and launches between two of them, and threads that wait",
    "after the last phase": "no phase; the step ends, and returns to your script",
    "your script": "no phase; code outside of mgpu_core's calls: the loss, other layers, and autograd's own work",
}


def _cells(phase: Phase) -> tuple[str, ...]:
    return (
        phase.name,
        str(phase.ranks or "-"),
        str(len(phase.collectives) or "-"),
        human_nbytes(phase.moved_nbytes) if phase.collectives else "-",
        human_seconds(phase.seconds),
        f"{phase.share:.1%}",
        "-" if phase.bus_gbps is None else f"{phase.bus_gbps:.2f}",
    )
