"""The runs of pipelines in a step: real times next to the schedule's slots, idle shares, bytes on each border."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mgpu_core.pipeline.schedules import bubble
from mgpu_core.tools.explain.phases import covered
from mgpu_core.tools.explain.steps import Step
from mgpu_core.trace.events import Schedule, Span

__all__ = ["Timeline", "timelines_of"]


@dataclass(frozen=True)
class Timeline:
    """One run of a pipeline.

    Attributes:
        schedule: its plan.
        spans: of its actions, with stages as ranks and micro-batches as buckets.
    """

    schedule: Schedule
    spans: list[Span]

    @property
    def slots(self) -> int:
        """The length of the plan, in actions."""
        return 1 + max(slot for slot, *_ in self.schedule.actions)

    @property
    def bubble(self) -> float:
        """The share of the workers' slots, 0 to 1, in which the plan gives them nothing to do."""
        return bubble(self.schedule.actions, len(set(self.schedule.workers)))

    @property
    def seconds(self) -> float:
        """The time from the first action's begin to the last one's end."""
        return (max(each.end_ns for each in self.spans) - min(each.begin_ns for each in self.spans)) / 1e9

    @property
    def idle(self) -> float:
        """The share of the workers' time, 0 to 1, between the first action's begin and the last one's end."""
        workers = self.schedule.workers
        busy = 0
        for worker in set(workers):
            worker_spans = [each for each in self.spans if workers[each.rank] == worker]
            busy += covered((each.begin_ns, each.end_ns) for each in worker_spans)
        return 1 - busy / 1e9 / (self.seconds * len(set(workers))) if self.seconds else 0.0

    def data(self, step: Step) -> dict[str, Any]:
        """Return the page's data."""
        return {
            "stages": [step.devices[stage] for stage in range(len(self.schedule.workers))],
            "slots": self.slots,
            "ideal": [list(action) for action in self.schedule.actions],
        }


def timelines_of(step: Step) -> list[Timeline]:
    """Return the runs of pipelines in a step, with the spans of each."""
    timelines: list[Timeline] = []
    before = 0  # the end of the run before
    for schedule in step.schedules:
        spans = [
            span
            for span in step.spans
            if span.step in ("forward", "backward")
            and 0 <= span.rank < len(schedule.workers)
            and before <= span.host_begin_ns <= schedule.host_begin_ns
        ]
        before = schedule.host_begin_ns
        if spans:
            timelines.append(Timeline(schedule, spans))
    return timelines
