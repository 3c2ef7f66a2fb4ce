"""A recording as a story: its steps, and in each what was done, by whom, with which bytes, for how long.

A step is one call of ``TrainStep``, one forward of ``DataParallel`` with the backward behind it, or the functional
calls between two of those.  A backward goes to the forward that came last before it; so do calls behind a forward that
look like its backward (scatter, gather, broadcast, reduce).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mgpu_core.entries import ALL_RANKS, NO_BUCKET, Collective, Contents, Cut, Entry, Mark, Span
from mgpu_core.explain.environment import environment
from mgpu_core.explain.step_profile import StepProfile
from mgpu_core.explain.topology import Machine
from mgpu_core.record import WHOLE_STEPS, Recording

__all__ = ["Step", "Story"]

_OF_BACKWARD = ("scatter", "gather", "broadcast", "reduce", "backward", "ready")
CALLS = "calls"


def begin_of(entry: Entry) -> int:
    """When the host was there."""
    return entry.host_begin_ns


def name_of(entry: Entry) -> str:
    """The step or operation."""
    return entry.operation if isinstance(entry, Collective) else entry.step


@dataclass(frozen=True)
class Step:
    """One step of a story.

    Attributes:
        number: from 0.
        name: ``train_step``, ``data_parallel``, ``evaluate``, or ``calls``.
        entries: by their begin on the host.
    """

    number: int
    name: str
    entries: Sequence[Entry]

    @cached_property
    def spans(self) -> list[Span]:
        """What took time; where autograd runs the ranks' backward by itself, from its marks."""
        found = [each for each in self.entries if isinstance(each, Span)]
        return found if any(each.step == "backward" for each in found) else [*found, *_backwards(self.marks)]

    @cached_property
    def cuts(self) -> list[Cut]:
        """Which rows are whose."""
        return [each for each in self.entries if isinstance(each, Cut)]

    @cached_property
    def collectives(self) -> list[Collective]:
        """Which bytes went where."""
        return [each for each in self.entries if isinstance(each, Collective)]

    @cached_property
    def marks(self) -> list[Mark]:
        """Moments."""
        return [each for each in self.entries if isinstance(each, Mark)]

    @cached_property
    def contents(self) -> dict[int, Contents]:
        """What each bucket is made of."""
        return {each.bucket: each for each in self.entries if isinstance(each, Contents)}

    @cached_property
    def begin_ns(self) -> int:
        """Its first moment."""
        return min(min(_times(each)) for each in self.entries)

    @cached_property
    def end_ns(self) -> int:
        """Its last moment, on the host or on a device."""
        return max(max(_times(each)) for each in self.entries)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Of the ranks, first rank first."""
        found: dict[int, str] = {}
        for span in self.spans:
            if span.rank != ALL_RANKS and span.device:
                found.setdefault(span.rank, span.device)
        for call in self.collectives:
            for rank, device in zip(call.ranks, call.devices, strict=True):
                found.setdefault(rank, device)
        for cut in self.cuts:
            for rank, device in enumerate(cut.devices):
                found.setdefault(rank, device)
        return tuple(found[rank] for rank in sorted(found))

    @cached_property
    def _of_buckets(self) -> list[Span]:
        return [span for span in self.spans if span.bucket != NO_BUCKET]

    def bucket_of(self, call: Collective) -> int:
        """The bucket in whose span the call was made; ``NO_BUCKET``."""
        around = [
            span
            for span in self._of_buckets
            if span.thread == call.thread
            and span.host_begin_ns <= call.host_begin_ns
            and call.host_end_ns <= span.host_end_ns
        ]
        return around[-1].bucket if around else NO_BUCKET


@dataclass
class Story:
    """What :func:`mgpu_core.explain` has seen; empty until its ``with`` block ends.

    Attributes:
        steps: in order.
        dropped: entries that were too many to keep.
        environment: what it ran on, for headers.
        machine: what tables and pages predict collectives by; see :meth:`predict`.
    """

    steps: list[Step] = field(default_factory=list)
    dropped: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    machine: Machine | None = None

    def fill(self, recording: Recording) -> None:
        """Takes over what was recorded."""
        self.steps = steps_of(recording.entries)
        self.dropped = recording.dropped
        self.environment = environment()

    def __len__(self) -> int:
        return len(self.steps)

    def predict(self, machine: Machine | None = None) -> None:
        """From now on the table and the page show, beside each collective's time, what the cost model says.

        Args:
            machine: by whose constants (:func:`mgpu_core.explain.topology.parse_topology` knows names); ``None``: this
                machine's memory, as CPU ranks share it, measured for some seconds if it was not before.

        Raises:
            ValueError: no machine is named, and there are ranks elsewhere than on the CPU.
        """
        from mgpu_core.explain.fit import this_host

        if machine is None and any(device != "cpu" for step in self.steps for device in step.devices):
            raise ValueError("name a topology: only the memory that CPU ranks share can be measured by itself")
        self.machine = this_host() if machine is None else machine

    def table(self, number: int = -1) -> str:
        """One step as a table for the terminal: bytes moved, time, share of the step, bus bandwidth.

        Args:
            number: of the step; negative ones count from the last.

        Raises:
            IndexError: there is no such step.
        """
        from mgpu_core.explain.table import table

        return table(self.step(number), self.environment, self.machine, self.dropped)

    def save_trace(self, path: str | Path) -> None:
        """Writes all steps as a trace for https://ui.perfetto.dev or ``chrome://tracing``: a track per rank and stream.

        Raises:
            OSError: the file cannot be written; one before it is kept.
        """
        from mgpu_core.explain.trace import write_trace

        write_trace(self, Path(path))

    def save_html(self, path: str | Path) -> None:
        """Writes the animated page: one file that needs no network.

        Raises:
            ValueError: nothing was recorded.
            OSError: the file cannot be written; one before it is kept.
        """
        from mgpu_core.explain.page import write_page

        write_page(self, Path(path))

    def profile(self, number: int = -1, name: str = "recorded step") -> StepProfile:
        """One training step in the numbers from which :mod:`mgpu_core.explain.cost` predicts other sizes.

        Raises:
            IndexError: there is no such step.
            ValueError: the step has no forward and backward of its own.
        """
        from mgpu_core.explain.profiles import profile_of

        return profile_of(self.step(number), name)

    def step(self, number: int = -1) -> Step:
        """One step; negative numbers count from the last.

        Raises:
            IndexError: there is no such step.
        """
        try:
            return self.steps[number]
        except IndexError:
            raise IndexError(f"the story has {len(self.steps)} steps, and no step {number}") from None


def steps_of(entries: Iterable[Entry]) -> list[Step]:
    """The entries, sorted into the steps they belong to."""
    ordered = sorted(entries, key=begin_of)
    heads = _outermost([each for each in ordered if isinstance(each, Span) and each.step in WHOLE_STEPS])
    groups: list[tuple[str, list[Entry]]] = []
    head: Span | None = None
    rest = iter([*heads, None])
    following = next(rest)
    for entry in ordered:
        while following is not None and begin_of(entry) >= following.host_begin_ns:
            head, following = following, next(rest)
            groups.append((head.step, []))
        if head is not None and _belongs(entry, head):
            _group_of(groups, head.step).append(entry)
        else:
            if not groups or groups[-1][0] != CALLS:
                groups.append((CALLS, []))
            groups[-1][1].append(entry)
    whole = [(name, found) for name, found in groups if found]
    return [Step(number, name, found) for number, (name, found) in enumerate(whole)]


def _group_of(groups: Sequence[tuple[str, list[Entry]]], name: str) -> list[Entry]:
    """The latest of that name: calls of the user's own may have come between a forward and its backward."""
    return next(found for each, found in reversed(groups) if each == name)


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """Those that are in no other of them; by their begin."""
    found: list[Span] = []
    for span in spans:
        if not found or span.host_begin_ns >= found[-1].host_end_ns:
            found.append(span)
    return found


def _belongs(entry: Entry, head: Span) -> bool:
    """To a step: what began in it; and the backward of a forward, which is the user's own line."""
    if begin_of(entry) <= head.host_end_ns:
        return True
    return head.step == "data_parallel" and name_of(entry) in _OF_BACKWARD


def _backwards(marks: Sequence[Mark]) -> list[Span]:
    """Of each rank, from the moment when its first gradient came to the one when its last bucket was ready."""
    begins = {mark.rank: mark for mark in reversed(marks) if mark.step == "backward"}
    ends = {mark.rank: mark for mark in marks if mark.step == "ready"}
    return [
        Span(
            "backward", rank, NO_BUCKET, "", begin.at_ns, ends[rank].at_ns,
            begin.host_begin_ns, ends[rank].host_begin_ns, begin.thread,
        )
        for rank, begin in sorted(begins.items())
        if rank in ends and begin.at_ns <= ends[rank].at_ns
    ]  # fmt: skip


def _times(entry: Entry) -> tuple[int, ...]:
    if isinstance(entry, Span):
        return entry.begin_ns, entry.end_ns, entry.host_begin_ns, entry.host_end_ns
    if isinstance(entry, Collective):
        return entry.host_begin_ns, entry.host_end_ns, *(at for pair in entry.times.values() for at in pair)
    return (entry.at_ns, entry.host_begin_ns) if isinstance(entry, Mark) else (entry.host_begin_ns,)
