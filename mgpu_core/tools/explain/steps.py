"""The steps of a trace: phases, ranks, bytes and times.

A step is one call of ``TrainStep``, one forward of ``DataParallel`` with all backwards through it, whenever they ran,
or the functional calls between the begins of two of those.  All batches of predictors are one more step, the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mgpu_core.trace.buffer import WholeStep
from mgpu_core.trace.events import (
    ALL_RANKS,
    INFERENCE,
    NO_BUCKET,
    Collective,
    Contents,
    Cut,
    Event,
    Mark,
    Parts,
    Schedule,
    Served,
    Span,
)  # fmt: skip

__all__ = ["BATCHES", "CALLS", "Recorded", "Step", "begin_of", "steps_of"]

CALLS, BATCHES = "calls", "inference"
_BEHIND = ""  # the name, before it has one, of what is part of no whole step


def begin_of(event: Event) -> int:
    """When the host was there."""
    return event.host_begin_ns


@dataclass(frozen=True)
class Step:
    """One step of a trace.

    Attributes:
        number: from 0.
        name: ``train_step``, ``data_parallel``, ``pipeline``, ``place``, ``evaluate``, ``calls``, or ``inference``.
        events: by their begin on the host.
    """

    number: int
    name: str
    events: Sequence[Event]

    @cached_property
    def spans(self) -> list[Span]:
        """The recorded spans.  Those of ``backward`` are made from its marks where autograd runs it."""
        spans = [each for each in self.events if isinstance(each, Span)]
        return spans if any(each.step == "backward" for each in spans) else [*spans, *_backwards(self.marks)]

    @cached_property
    def cuts(self) -> list[Cut]:
        """The cuts: rows of each rank."""
        return [each for each in self.events if isinstance(each, Cut)]

    @cached_property
    def collectives(self) -> list[Collective]:
        """The collectives, with the bytes that they moved."""
        return [each for each in self.events if isinstance(each, Collective)]

    @cached_property
    def schedules(self) -> list[Schedule]:
        """The plans of pipelines, whose ranks are stages and whose cuts are of micro-batches."""
        return [each for each in self.events if isinstance(each, Schedule)]

    @cached_property
    def parts(self) -> list[Parts]:
        """The devices of the layers of each module that is spread over devices, at its last call."""
        return list({each.placement: each for each in self.events if isinstance(each, Parts)}.values())

    @cached_property
    def served(self) -> list[Served]:
        """The batches of predictors; :func:`mgpu_core.tools.explain.batches.batches_of` adds their times."""
        return [each for each in self.events if isinstance(each, Served)]

    @cached_property
    def marks(self) -> list[Mark]:
        """Moments."""
        return [each for each in self.events if isinstance(each, Mark)]

    def joint_of(self, call: Collective) -> str:
        """Return the layer after which ranks met for a collective of the forward; an empty text: none."""
        before = [
            mark
            for mark in self.marks
            if mark.step == "meet" and mark.thread == call.thread and mark.host_begin_ns <= call.host_begin_ns
        ]
        return max(before, key=begin_of).text if before else ""

    @cached_property
    def contents(self) -> dict[int, Contents]:
        """The contents of each bucket of the step itself, not of a wrapper inside its ranks."""
        phase = "all_reduce" if self.name == "train_step" else "replicate"
        by_bucket: dict[int, Contents] = {}
        for event in self.events:
            if isinstance(event, Contents) and event.step == phase:
                by_bucket.setdefault(event.bucket, event)
        return by_bucket

    @cached_property
    def begin_ns(self) -> int:
        """The first time of the step, ns."""
        return min(min(_times(each)) for each in self.events)

    @cached_property
    def end_ns(self) -> int:
        """The last time of the step, on the host or a device, ns."""
        return max(max(_times(each)) for each in self.events)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices of the ranks; empty text: not recorded."""
        by_rank: dict[int, str] = {}
        for span in self.spans:
            if span.rank != ALL_RANKS and span.device:
                by_rank.setdefault(span.rank, span.device)
        for call in self.collectives if not self.schedules else ():
            for rank, device in zip(call.ranks, call.devices, strict=True):
                by_rank.setdefault(rank, device)
        for cut in self.cuts if not self.schedules else ():
            for rank, device in enumerate(cut.devices):
                by_rank.setdefault(rank, device)
        return tuple(by_rank.get(rank, "") for rank in range(max(by_rank, default=-1) + 1))

    @cached_property
    def workers(self) -> str:
        """How the ranks of a whole step ran: ``threads``, each in its own thread; ``caller``, in the caller's.

        Empty where fewer than two ranks were seen in their forward.
        """
        around = [span.thread for span in self.spans if span.step == self.name]
        forwards = [span for span in self.spans if span.step == "forward"]
        if not around or len({span.rank for span in forwards}) < 2:
            return ""
        meets = any(mark.step == "meet" for mark in self.marks)  # inside the forward of a cut module
        return "threads" if meets or forwards[0].thread != around[0] else "caller"

    @cached_property
    def _of_buckets(self) -> list[Span]:
        return [span for span in self.spans if span.bucket != NO_BUCKET]

    def bucket_of(self, call: Collective) -> int:
        """Return the bucket in whose span the call was made; ``NO_BUCKET``."""
        around = self.bucket_span(call)
        return NO_BUCKET if around is None else around.bucket

    def bucket_span(self, call: Collective) -> Span | None:
        """Return the span of a bucket in which the call was made."""
        around = [
            span
            for span in self._of_buckets
            if span.thread == call.thread
            and span.host_begin_ns <= call.host_begin_ns
            and call.host_end_ns <= span.host_end_ns
        ]
        return around[-1] if around else None


@dataclass
class Recorded:
    """The data of a trace, which tables, pages and files are made from.

    Attributes:
        steps: in order.
        dropped: number of events that were over the limit.
        environment: versions and names of the machine, for headers.
    """

    steps: list[Step] = field(default_factory=list)
    dropped: int = 0
    environment: dict[str, str] = field(default_factory=dict)


def steps_of(events: Iterable[Event], whole_steps: Mapping[int, WholeStep]) -> list[Step]:
    """Return the events by the steps that they belong to; events of no step stand between two of them.

    The batches of predictors are the last step, since they may run during all others.
    """
    begins = [each.begin_ns for each in whole_steps.values()]
    index_of = {number: index for index, number in enumerate(whole_steps)}
    names = [each.name for each in whole_steps.values()]
    groups: dict[tuple[int, str], list[Event]] = {}
    for event in sorted(events, key=begin_of):
        index = index_of.get(event.whole_step)
        before = bisect_right(begins, begin_of(event)) - 1
        key = (before, _BEHIND) if index is None else (index, names[index])
        if event.whole_step == INFERENCE:
            key = (len(begins), BATCHES)
        groups.setdefault(key, []).append(event)
    ordered = sorted(groups, key=lambda key: (key[0], key[1] == _BEHIND))
    return [Step(number, key[1] or CALLS, groups[key]) for number, key in enumerate(ordered)]


def _backwards(marks: Sequence[Mark]) -> list[Span]:
    """Return a span per run of backward and rank, from the first gradient to the last bucket or the run's end."""
    first: dict[tuple[str, int], Mark] = {}
    last: dict[tuple[str, int], Mark] = {}
    for mark in marks:
        key = mark.text, mark.rank
        if mark.step == "backward":
            first.setdefault(key, mark)
        elif mark.step == "ready" or (mark.step == "backward ends" and key not in last):
            last[key] = mark
    return [
        Span(
            "backward", begin.rank, NO_BUCKET, "", begin.at_ns, last[key].at_ns,
            begin.host_begin_ns, last[key].host_begin_ns, begin.thread,
        )
        for key, begin in first.items()
        if key in last and begin.at_ns <= last[key].at_ns
    ]  # fmt: skip


def _times(event: Event) -> tuple[int, ...]:
    if isinstance(event, Span):
        return event.begin_ns, event.end_ns, event.host_begin_ns, event.host_end_ns
    if isinstance(event, Collective):
        return event.host_begin_ns, event.host_end_ns, *(at for pair in event.times.values() for at in pair)
    return (event.at_ns, event.host_begin_ns) if isinstance(event, Mark) else (event.host_begin_ns,)
