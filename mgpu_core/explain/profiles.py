"""A recorded step in the few numbers from which other sizes are predicted."""

from __future__ import annotations

from statistics import median

from mgpu_core.entries import Collective, Span
from mgpu_core.explain.phases import phases_of
from mgpu_core.explain.step_profile import Bucket, StepProfile
from mgpu_core.explain.story import Step

__all__ = ["profile_of"]


def profile_of(step: Step, name: str) -> StepProfile:
    """See :meth:`mgpu_core.explain.Story.profile`."""
    forward, loss, update = (_seconds(step, each) for each in ("forward", "loss", "update"))
    backward = _total_seconds(step, "backward")
    if not forward or not backward:
        raise ValueError(f"step {step.number} ({step.name}) has no forward and backward to predict other sizes from")
    rows = next((sum(cut.counts) for cut in step.cuts if cut.step == "scatter"), 0)
    whole = (step.end_ns - step.begin_ns) / 1e9
    covered = sum(each.seconds for each in phases_of(step) if each.name in ("forward", "loss", "backward", "update"))
    return StepProfile(
        name=name,
        ranks=max(1, len(step.devices)),
        rows=rows,
        forward_seconds=forward + loss,
        backward_seconds=backward,
        update_seconds=update,
        scatter_nbytes=_cut_nbytes(step, "scatter"),
        gather_nbytes=_cut_nbytes(step, "gather"),
        buckets=_buckets(step),
        host_overhead_seconds=max(0.0, whole - covered),
    )


def _spans(step: Step, name: str) -> list[Span]:
    return [span for span in step.spans if span.step == name]


def _seconds(step: Step, name: str) -> float:
    """Of one rank: the middle one."""
    spans = _spans(step, name)
    return median((span.end_ns - span.begin_ns) / 1e9 for span in spans) if spans else 0.0


def _total_seconds(step: Step, name: str) -> float:
    """Of one rank, all its runs together: the middle one."""
    of_rank: dict[int, float] = {}
    for span in _spans(step, name):
        of_rank[span.rank] = of_rank.get(span.rank, 0.0) + (span.end_ns - span.begin_ns) / 1e9
    return median(of_rank.values()) if of_rank else 0.0


def _cut_nbytes(step: Step, name: str) -> int:
    return sum(sum(cut.nbytes) for cut in step.cuts if cut.step == name)


def _buckets(step: Step) -> tuple[Bucket, ...]:
    """In the order of their sums, with the moment at which the last rank had its gradients."""
    begin, end = _backward_interval(step)
    own = "all_reduce" if step.name == "train_step" else "reduce"
    found = []
    for call in step.collectives:
        around = step.bucket_span(call)
        if around is not None and around.step == own and call.operation == "reduce" and max(call.nbytes):
            ready = _fraction(_ready_ns(step, around.bucket, call), begin, end)
            found.append(Bucket(max(call.nbytes), ready))
    return tuple(found)


def _ready_ns(step: Step, bucket: int, call: Collective) -> int:
    ready = [mark.at_ns for mark in step.marks if mark.step == "ready" and mark.bucket == bucket]
    return max(ready, default=call.host_begin_ns)


def _backward_interval(step: Step) -> tuple[int, int]:
    spans = _spans(step, "backward")
    return min(each.begin_ns for each in spans), max(each.end_ns for each in spans)


def _fraction(at: int, begin: int, end: int) -> float:
    return min(1.0, max(0.0, (at - begin) / (end - begin))) if end > begin else 1.0
