"""A recorded step in the few numbers from which other sizes are predicted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from mgpu_core.tools.explain.phases import SUMS, UPDATE, Phase, covered, phases_of
from mgpu_core.tools.explain.step_profile import BucketProfile, StepProfile
from mgpu_core.tools.explain.steps import Step
from mgpu_core.trace.events import ALL_RANKS, Collective, Span

__all__ = ["profile_of"]

_MODELLED = ("forward", "loss", "backward", *UPDATE, *SUMS, "scatter", "gather", "replicate")
"""What a prediction has a part for: none of it is the host's own time."""


def profile_of(step: Step, name: str) -> StepProfile:
    """See :meth:`mgpu_core.tools.explain.trace.Trace.profile`."""
    if step.schedules or _spans(step, "meet"):
        raise ValueError(f"step {step.number} ({step.name}) ran over a Pipeline or a TensorParallel: none is predicted")
    forward, loss = (_seconds(step, each) for each in ("forward", "loss"))
    backward = _backward(step)
    if not forward or not backward:
        raise ValueError(f"step {step.number} ({step.name}) has no forward and backward to predict other sizes from")
    host_forward, host_backward = _host_seconds(step)
    phases = phases_of(step)
    return StepProfile(
        name=name,
        ranks=max(1, len(step.devices)),
        rows=next((sum(cut.counts) for cut in step.cuts if cut.step == "scatter"), 0),
        forward_seconds=forward + loss,
        backward_seconds=backward,
        update_seconds=_covered_ns(phases, UPDATE) / 1e9,
        scatter_nbytes=_cut_nbytes(step, "scatter"),
        gather_nbytes=_cut_nbytes(step, "gather"),
        buckets=_buckets(step),
        host_overhead_seconds=(step.end_ns - step.begin_ns - _covered_ns(phases, _MODELLED)) / 1e9,
        broadcast_nbytes=_broadcast_nbytes(phases),
        host_forward_seconds=host_forward,
        host_backward_seconds=host_backward,
        device=next((device.split(":")[0] for device in step.devices if device), ""),
    )


def _spans(step: Step, name: str) -> list[Span]:
    return [span for span in step.spans if span.step == name]


def _seconds(step: Step, name: str) -> float:
    """Return the median rank's seconds."""
    spans = _spans(step, name)
    return median((span.end_ns - span.begin_ns) / 1e9 for span in spans) if spans else 0.0


def _backward(step: Step) -> float:
    """Return the median rank's seconds, all its runs together.

    One call for all ranks runs those of a device in turn: each has its part of it.
    """
    joint = [span for span in _spans(step, "backward") if span.rank == ALL_RANKS]
    crowd = max(Counter(filter(None, step.devices)).values(), default=1) if joint else 1
    of_rank = _own_backwards([span for span in _spans(step, "backward") if span.rank != ALL_RANKS])
    return _together(joint) / crowd + median(of_rank or [0.0])


def _host_seconds(step: Step) -> tuple[float, float]:
    """Return the host's seconds for a rank's forward and loss, and for its backward; 0 off GPUs, which alone are asked.

    Threads of Python take turns, so that the forwards of all ranks share the time that they cover together; backwards
    do so on one device alone.
    """
    if not any(device.startswith("cuda") for device in step.devices):
        return 0.0, 0.0
    forward, backward = (
        covered((span.host_begin_ns, span.host_end_ns) for name in names for span in _spans(step, name))
        for names in (("forward", "loss"), ("backward",))
    )
    return forward / len(step.devices) / 1e9, backward / max(Counter(step.devices).values()) / 1e9


def _own_backwards(spans: Sequence[Span]) -> list[float]:
    """Return the seconds of each rank.

    The backwards that one thread of autograd runs take turns, node by node, so their spans cover each other's: each
    rank has its share of their union.
    """
    of_thread: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        of_thread[span.thread].append(span)
    of_rank: dict[int, float] = defaultdict(float)
    for mine in of_thread.values():
        ranks = {span.rank for span in mine}
        for rank in ranks:
            of_rank[rank] += _together(mine) / len(ranks)
    return list(of_rank.values())


def _together(spans: Iterable[Span]) -> float:
    return covered((span.begin_ns, span.end_ns) for span in spans) / 1e9


def _covered_ns(phases: Sequence[Phase], names: Sequence[str]) -> int:
    return covered(times for phase in phases if phase.name in names for times in phase.times)


def _broadcast_nbytes(phases: Sequence[Phase]) -> int:
    """Return the bytes that rank 0 broadcasts to all others; broadcasts inside a rank's forward do not count."""
    calls = [call for phase in phases if phase.name == "replicate" for call in phase.collectives]
    return sum(max(call.nbytes) for call in calls if call.operation == "broadcast")


def _cut_nbytes(step: Step, name: str) -> int:
    return sum(sum(cut.nbytes) for cut in step.cuts if cut.step == name)


def _buckets(step: Step) -> tuple[BucketProfile, ...]:
    """Return the buckets in the order of their sums, with the time at which the last rank had its gradients."""
    begin, end = _backward_interval(step)
    phase = "all_reduce" if step.name == "train_step" else "reduce"
    buckets = []
    for call in step.collectives:
        around = step.bucket_span(call)
        if around is not None and around.step == phase and call.operation == "reduce" and max(call.nbytes):
            ready = _fraction(_ready_ns(step, around.bucket, call), begin, end)
            buckets.append(BucketProfile(max(call.nbytes), ready))
    return tuple(buckets)


def _ready_ns(step: Step, bucket: int, call: Collective) -> int:
    ready = [mark.at_ns for mark in step.marks if mark.step == "ready" and mark.bucket == bucket]
    return max(ready, default=call.host_begin_ns)


def _backward_interval(step: Step) -> tuple[int, int]:
    spans = _spans(step, "backward")
    return min(each.begin_ns for each in spans), max(each.end_ns for each in spans)


def _fraction(at: int, begin: int, end: int) -> float:
    return min(1.0, max(0.0, (at - begin) / (end - begin))) if end > begin else 1.0
