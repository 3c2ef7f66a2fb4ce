"""A step as scenes that the page plays one after the other, in numbers alone.

A scene is something that a person can watch: rows that travel to their ranks, a bucket that is broadcast, the forwards,
one round of an all-reduce.  Overlapping scenes come in the order of their beginning; the timeline shows the overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from mgpu_core.support.tables import human_nbytes
from mgpu_core.tools.explain.cut_scenes import of_cuts, without_cutting
from mgpu_core.tools.explain.enclosing import Enclosing
from mgpu_core.tools.explain.phases import moved_by, moved_nbytes
from mgpu_core.tools.explain.scene import Scene, plural, scene, us
from mgpu_core.tools.explain.steps import Step
from mgpu_core.trace.events import (
    ALL_RANKS,
    BETWEEN,
    NO_BUCKET,
    Collective,
    Hop,
    Span,
)

__all__ = ["MOST_ARROWS", "scenes_of"]

MOST_ARROWS = 128  # in one scene; further ones are counted
_BY_RANKS = {
    "forward": "Each rank runs its replica of the module on its own rows, all at the same time.",
    "loss": "Each rank takes the loss of its own rows.",
    "backward": "Each rank computes gradients for its own rows. Buckets are summed as soon as all ranks have them.",
}


def scenes_of(step: Step) -> list[Scene]:
    """Return the scenes by their begin.  Times are microseconds from the begin of the step.

    A pipeline's step is one scene, and so are the batches of predictors: they have timelines of their own.
    """
    if step.schedules:
        return [_whole(step, "Each stage works on one micro-batch at a time.")]
    if step.served:
        return [_whole(step, "Each rank runs one batch at a time.")]
    enclosing = Enclosing(step.spans)
    cutting = [enclosing.span(cut.thread, cut.step, cut.host_begin_ns) for cut in step.cuts]
    calls = without_cutting(step.collectives, enclosing, cutting)
    scenes = [*of_cuts(step, cutting), *_of_ranks(step), *_of_collectives(step, calls), *_of_updates(step)]
    return sorted(scenes or [_whole(step, _UNKNOWN)], key=lambda entry: (entry["begin"], entry["order"]))


_UNKNOWN = "Nothing is known of its inside: a graph was replayed, or there was nothing to move."


def _whole(step: Step, text: str) -> Scene:
    return scene(step, "step", f"{step.name}, as a whole", text, (step.begin_ns, step.end_ns))


def _of_ranks(step: Step) -> Iterator[Scene]:
    """Return the scenes of work that all ranks do at once.  A backward that is run again is a scene of its own."""
    for name, text in _BY_RANKS.items():
        spans = [span for span in step.spans if span.step == name]
        runs = _runs(spans) if name == "backward" else [spans] if spans else []
        for number, run in enumerate(runs, 1):
            title = name.capitalize() if len(runs) == 1 else f"{name.capitalize()}, {number} of {len(runs)}"
            if name == "forward" and step.name == "tensor_parallel":
                text = "Each rank runs the module on all rows with its part of the layers; after some all ranks meet."
            if all(span.rank == ALL_RANKS for span in run):
                text = "One backward for all ranks: they meet in synchronised layers, or share a graph."
            yield _of_run(step, name, title, text, run)


def _runs(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the first span of each rank, the second of each, and so on."""
    met: Counter[int] = Counter()
    runs: list[list[Span]] = []
    for span in sorted(spans, key=lambda event: event.begin_ns):
        if met[span.rank] == len(runs):
            runs.append([])
        runs[met[span.rank]].append(span)
        met[span.rank] += 1
    return runs


def _of_run(step: Step, name: str, title: str, text: str, run: Sequence[Span]) -> Scene:
    begin, end = min(span.begin_ns for span in run), max(span.end_ns for span in run)
    ranks = [{"rank": each.rank, "begin": us(step, each.begin_ns), "end": us(step, each.end_ns)} for each in run]
    ready = [
        {"rank": mark.rank, "bucket": mark.bucket, "at": us(step, mark.at_ns)}
        for mark in step.marks
        if mark.step == "ready" and name == "backward" and begin <= mark.at_ns <= end
    ]
    return scene(step, name, title, text, (begin, end), ranks=ranks, ready=ready)


def _of_updates(step: Step) -> Iterator[Scene]:
    for span in step.spans:
        if span.step == "update":
            text = "The optimizer updates each device's parameters once, by the sums."
            yield scene(step, "update", "Update", text, (span.begin_ns, span.end_ns))


_VERBS = {"reduce": "summed", "all_reduce": "all-reduced", "broadcast": "broadcast", "all_gather": "all-gathered"}


def _of_collectives(step: Step, calls: Sequence[Collective]) -> Iterator[Scene]:
    """Return a scene per round: the hops that were given to the device together."""
    for call in calls:
        bucket = step.bucket_of(call)
        rounds = [list(group) for _, group in groupby(call.hops, key=lambda hop: hop.call)]
        about: dict[str, Any] = {
            "operation": call.operation,
            "route": call.route,
            "bucket": bucket,
            "nbytes": list(call.nbytes),
            "moved": moved_nbytes(call),
            "rounds": len(rounds),
        }
        if not rounds:
            text = (
                "A library moved the bytes and does not say how." if any(call.nbytes) else "There was nothing to move."
            )
            times = (call.host_begin_ns, call.host_end_ns)
            yield scene(step, "round", _title(step, call, bucket), text, times, **about, round=0, arrows=[], more=0)
        for number, hops in enumerate(rounds):
            yield _round(step, call, bucket, number, hops, about)


def _round(step: Step, call: Collective, bucket: int, number: int, hops: list[Hop], about: dict[str, Any]) -> Scene:
    arrows = _arrows(call, hops)
    title = _title(step, call, bucket)
    if about["rounds"] > 1:
        title += f", round {number + 1} of {about['rounds']}"
    return scene(
        step,
        "round",
        title,
        _text_of_round(hops),
        _times_of(call, hops),
        number,
        **about,
        round=number,
        arrows=arrows[:MOST_ARROWS],
        more=max(0, len(arrows) - MOST_ARROWS),
    )


def _times_of(call: Collective, hops: Sequence[Hop]) -> tuple[int, int]:
    """Return the times of a round: of the host's own copies exact, of a device those of the whole call."""
    if all(hop.stream == "host" for hop in hops):
        return min(hop.begin_ns for hop in hops), max(hop.end_ns for hop in hops)
    times = list(call.times.values()) or [(call.host_begin_ns, call.host_end_ns)]
    return min(begin for begin, _ in times), max(end for _, end in times)


def _title(step: Step, call: Collective, bucket: int) -> str:
    joint = step.joint_of(call)
    what = f"bucket {bucket} is" if bucket != NO_BUCKET else f"the outputs of {joint} are" if joint else "tensors are"
    return f"{call.operation} ({call.route}): {what} {_VERBS.get(call.operation, 'moved')}"


def _text_of_round(hops: Sequence[Hop]) -> str:
    """Return the scene with the table's bytes: data that a rank has already do not move."""
    nbytes = sum(map(moved_by, hops))
    doing = "moved and summed" if any(hop.sums for hop in hops) else "copied"
    tensors = len({number for hop in hops for _, number, _ in hop.targets})
    return f"{human_nbytes(nbytes)} of {plural(tensors, 'tensor')} are {doing}, in {plural(len(hops), 'operation')}."


def _arrows(call: Collective, hops: Sequence[Hop]) -> list[dict[str, Any]]:
    """Return the hops between the same ranks as one arrow; for a single tensor it names the chunk."""
    joined: dict[tuple[Any, ...], dict[str, Any]] = {}
    single = len({number for hop in hops for _, number, _ in hop.targets}) == 1
    for hop in hops:
        sources, targets = (tuple(rank for rank, _, _ in indices) for indices in (hop.sources, hop.targets))
        key = (hop.sums, sources, targets, hop.targets[0][2] if single else 0)
        arrow = joined.setdefault(
            key,
            {"sums": hop.sums, "from": list(sources), "to": list(targets), "nbytes": 0, "hops": 0, "offset": key[3]},
        )
        arrow["nbytes"] += hop.nbytes
        arrow["hops"] += 1
    known = [arrow for arrow in joined.values() if set(arrow["to"]) != {BETWEEN} or len(joined) == 1]
    # What a rank ends with: of an all-gather all parts together.
    whole = sum(call.nbytes) if call.operation == "all_gather" else max(call.nbytes, default=0)
    for arrow in known:
        arrow["whole"] = whole if single else arrow["nbytes"]
    return known
