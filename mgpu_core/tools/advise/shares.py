"""The shares of a recorded step's time, from intervals alone.

A step is compute (some rank is in its forward, loss or backward), exposed communication (buckets are summed, and no
rank computes), update, and the rest: the host splits the batch, wakes the ranks, launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from mgpu_core.tools.explain.phases import SUMS, UPDATE, Interval, covered
from mgpu_core.tools.explain.steps import Step
from mgpu_core.trace.events import ALL_RANKS, Span

__all__ = ["StepShares", "Times", "shares_of", "times_of"]

_COMPUTE = ("forward", "loss", "backward")


@dataclass(frozen=True, slots=True)
class Times:
    """The intervals of a step's activities.

    Attributes:
        whole: from its first moment to its last.
        compute: per rank its forward, loss and backward.
        sums: of the buckets.
        update: of the optimizer, and of the norm that it needs.
        launch_ratio: the host's time to launch the compute over the GPU's time to run it; ``None`` off GPUs.
    """

    whole: Interval
    compute: Sequence[Sequence[Interval]]
    sums: Sequence[Interval]
    update: Sequence[Interval]
    launch_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class StepShares:
    """Of one step; shares are 0 to 1, and the first four add up to 1.

    Attributes:
        step_s: how long it took, seconds.
        compute_share: some rank computed.
        exposed_share: sums that no forward or backward hid.
        update_share: the optimizer, while nothing of the above went on.
        overhead_share: none of these: the host.
        imbalance: compute of the slowest rank over the mean, less 1.
        waiting_share: of the step, how much longer the slowest rank computed than the mean.
        launch_ratio: see :class:`Times`; 1: the GPUs wait for the host.
    """

    step_s: float
    compute_share: float
    exposed_share: float
    update_share: float
    overhead_share: float
    imbalance: float
    waiting_share: float
    launch_ratio: float | None = None


def shares_of(times: Times) -> StepShares:
    """Return the shares of a step with these times."""
    whole = max(1, times.whole[1] - times.whole[0])
    compute = [each for rank in times.compute for each in rank]
    computed = covered(compute)
    with_sums = covered([*compute, *times.sums])
    with_update = covered([*compute, *times.sums, *times.update])
    ranks = [covered(rank) for rank in times.compute] or [0]
    slowest, middle = max(ranks), mean(ranks)
    return StepShares(
        whole / 1e9,
        compute_share=computed / whole,
        exposed_share=(with_sums - computed) / whole,
        update_share=(with_update - with_sums) / whole,
        overhead_share=(whole - with_update) / whole,
        imbalance=slowest / middle - 1 if middle else 0.0,
        waiting_share=(slowest - middle) / whole,
        launch_ratio=times.launch_ratio,
    )


def times_of(step: Step) -> Times:
    """Return the times of a recorded step of ``TrainStep``."""
    by_rank: dict[int, list[Span]] = {}
    for span in step.spans:
        if span.step in _COMPUTE:
            by_rank.setdefault(span.rank, []).append(span)
    every = by_rank.pop(ALL_RANKS, [])  # one backward for all: each rank's
    ranks = [[*spans, *every] for spans in by_rank.values()] or [every]
    return Times(
        (step.begin_ns, step.end_ns),
        [[(span.begin_ns, span.end_ns) for span in spans] for spans in ranks],
        [each for span in step.spans if span.step in SUMS for each in _of_sums(step, span)],
        [(span.begin_ns, span.end_ns) for span in step.spans if span.step in UPDATE],
        _launch_ratio([span for spans in ranks for span in spans]),
    )


def _of_sums(step: Step, span: Span) -> list[Interval]:
    """When the devices summed, which may be later than the host's span; that one where no collective was made."""
    inside = [
        call
        for call in step.collectives
        if call.thread == span.thread
        and span.host_begin_ns <= call.host_begin_ns
        and call.host_end_ns <= span.host_end_ns
    ]
    intervals = [times for call in inside for times in call.times.values()]
    return intervals or [(span.begin_ns, span.end_ns)]


def _launch_ratio(spans: Sequence[Span]) -> float | None:
    gpu = [span for span in spans if span.device.startswith("cuda")]  # others have the host's times
    run = sum(span.end_ns - span.begin_ns for span in gpu)
    return sum(span.host_end_ns - span.host_begin_ns for span in gpu) / run if run else None
