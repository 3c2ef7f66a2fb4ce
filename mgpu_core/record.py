"""What happened, for those who want to see it: one flag, and what is kept while it is up.

Every step of the road opens a span; cuts, collectives and gradients that are ready leave entries of their own.  With
recording off, which is the normal state, a span is one shared object that does nothing.  Everyone imports this file; of
ours it imports the entries and the core alone.  ``mgpu_core.explain`` reads what was kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.entries import ALL_RANKS, NO_BUCKET, Collective, Entry, Mark, Span

__all__ = [
    "Clock",
    "WHOLE_STEPS",
    "Recording",
    "begin_marks",
    "is_on",
    "keep",
    "labelled",
    "mark",
    "recording",
    "span",
]


class Clock(Protocol):
    """Tells the time on devices whose work is later than its launch."""

    def mark(self, device: torch.device) -> object:
        """A moment in the work of the device's current stream; ``None``: the host's time will do."""

    def ns(self, mark: Any) -> int:
        """When it was, by the host's clock; waits for it."""


class _HostClock:
    def mark(self, _device: torch.device) -> object:
        return None

    def ns(self, mark: Any) -> int:
        raise NotImplementedError


_Draft: TypeAlias = Callable[[Clock], Entry]
Label: TypeAlias = Callable[[str], AbstractContextManager[object]]


@dataclass(slots=True)
class Recording:
    """What one recording keeps; added to by any thread.  Read it after its end, when all times are known.

    Args:
        clock: of the devices.
        skip: so many whole steps pass before anything is kept.
        steps: so many are kept, then the recording ends by itself; ``None``: all.
        limit: so many entries are kept, and those behind them counted alone: a recording that was forgotten must not
            fill the memory.

    Attributes:
        entries: in the order in which they ended, after the recording.
        dropped: how many there were too many.
    """

    clock: Clock = field(default_factory=_HostClock)
    skip: int = 0
    steps: int | None = None
    limit: int = 200_000
    entries: list[Entry] = field(default_factory=list)
    dropped: int = 0
    _begun: int = 0
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _drafts: list[_Draft] = field(default_factory=list)

    def begin_step(self) -> None:
        """A whole step begins; one inside another, in whatever thread, is none of its own."""
        with self._lock:
            self._open += 1
            self._begun += self._open == 1
            is_over = self.steps is not None and self._begun > self.skip + self.steps
        if is_over:
            _end(self)

    def end_step(self) -> None:
        """A whole step has ended."""
        with self._lock:
            self._open -= 1

    def add(self, draft: _Draft) -> None:
        """Keeps an entry whose times are known at the end."""
        over = self.steps is not None and self._begun > self.skip + self.steps
        if over or (self.skip and self._begun <= self.skip):
            return
        if len(self._drafts) < self.limit:
            self._drafts.append(draft)
        else:
            self.dropped += 1

    def finish(self) -> None:
        """Waits for the devices, and fills ``entries``."""
        self.entries = [draft(self.clock) for draft in self._drafts]
        self._drafts.clear()

    def names(self) -> list[str]:
        """The names of spans, cuts and marks, and the operations of collectives, in order."""
        return [each.operation if isinstance(each, Collective) else each.step for each in self.entries]


class _Nothing:
    """With these two a ``with`` block costs a third of one with methods (measured)."""

    __slots__ = ()
    __enter__ = _core.enter_nothing
    __exit__ = _core.leave_nothing


@dataclass(frozen=True, slots=True)
class _Sink:
    """Where spans go: into a recording, and into the names that profilers show."""

    story: Recording | None
    label: Label | None


class _Span:
    __slots__ = ("_begin", "_bucket", "_device", "_host_ns", "_label", "_rank", "_sink", "_step")

    def __init__(self, sink: _Sink, step: str, rank: int, device: torch.device | None, bucket: int) -> None:
        self._sink, self._step, self._rank, self._device, self._bucket = sink, step, rank, device, bucket

    def __enter__(self) -> None:
        sink = self._sink
        if sink.label is not None:
            self._label = sink.label(_label_of(self._step, self._rank, self._bucket))
            self._label.__enter__()
        if sink.story is not None:
            if self._step in WHOLE_STEPS:
                sink.story.begin_step()
            self._host_ns = time.perf_counter_ns()
            self._begin = None if self._device is None else sink.story.clock.mark(self._device)

    def __exit__(self, *error: object) -> None:
        sink = self._sink
        if sink.story is not None:
            if self._step in WHOLE_STEPS:
                sink.story.end_step()
            end = None if self._device is None else sink.story.clock.mark(self._device)
            sink.story.add(self._draft(time.perf_counter_ns(), end))
        if sink.label is not None:
            self._label.__exit__(*error)  # type: ignore[arg-type]

    def _draft(self, end_ns: int, end: object) -> _Draft:
        thread, begin_ns = threading.get_ident(), self._host_ns
        device = "" if self._device is None else str(self._device)

        def draft(clock: Clock) -> Span:
            on_device = self._begin is not None and end is not None
            times = (clock.ns(self._begin), clock.ns(end)) if on_device else (begin_ns, end_ns)
            return Span(self._step, self._rank, self._bucket, device, *times, begin_ns, end_ns, thread)

        return draft


def _label_of(step: str, rank: int, bucket: int) -> str:
    words = ["mgpu", step]
    if rank != ALL_RANKS:
        words.append(f"rank {rank}")
    if bucket != NO_BUCKET:
        words.append(f"bucket {bucket}")
    return " ".join(words)


_NOTHING: AbstractContextManager[None] = _Nothing()  # type: ignore[assignment]  # which takes them for methods
_sink: _Sink | None = None  # the flag
WHOLE_STEPS = ("train_step", "data_parallel", "evaluate")


def span(
    step: str, rank: int = ALL_RANKS, device: torch.device | None = None, bucket: int = NO_BUCKET
) -> AbstractContextManager[None]:
    """A context manager around one step of the road; nothing when nobody wants to know.

    Args:
        device: where the work runs that is launched inside, on the current stream of this thread.
    """
    sink = _sink
    return _NOTHING if sink is None else _Span(sink, step, rank, device, bucket)


def is_on() -> bool:
    """Whether a recording is on: ask before computing what only an entry needs."""
    sink = _sink
    return sink is not None and sink.story is not None


def keep(make: Callable[[int, int], Entry]) -> None:
    """Adds ``make(host_ns, thread)`` to the recording, if one is on."""
    sink = _sink
    if sink is not None and sink.story is not None:
        entry = make(time.perf_counter_ns(), threading.get_ident())
        sink.story.add(lambda _clock: entry)


def mark(
    step: str, rank: int = ALL_RANKS, device: torch.device | None = None, bucket: int = NO_BUCKET, text: str = ""
) -> None:
    """A moment, on the device's current stream or in this thread; nothing when no recording is on."""
    sink = _sink
    if sink is None or sink.story is None:
        return
    host_ns, thread = time.perf_counter_ns(), threading.get_ident()
    at = None if device is None else sink.story.clock.mark(device)
    sink.story.add(
        lambda clock: Mark(step, rank, bucket, text, host_ns if at is None else clock.ns(at), host_ns, thread)
    )


def begin_marks(devices: Sequence[torch.device]) -> tuple[Recording, dict[str, object]] | None:
    """The recording, and a mark on each device's current stream; ``None`` when no recording is on."""
    sink = _sink
    if sink is None or sink.story is None:
        return None
    return sink.story, {str(device): sink.story.clock.mark(device) for device in dict.fromkeys(devices)}


_lock = threading.Lock()  # of the three below; whoever only looks at the flag takes none
_story: Recording | None = None
_labels: list[Label] = []  # the last one names


def _show() -> None:
    """Brings the flag up to what is on."""
    global _sink
    label = _labels[-1] if _labels else None
    _sink = None if _story is None and label is None else _Sink(_story, label)


def _end(story: Recording) -> None:
    """Takes the recording away, if it is still this one; names for profilers stay as long as who wants them."""
    global _story
    with _lock:
        if _story is story:
            _story = None
            _show()


@contextmanager
def recording(
    clock: Clock | None = None, label: Label | None = None, *, skip: int = 0, steps: int | None = None
) -> Iterator[Recording]:
    """Records everything that the process does meanwhile, in all its threads.

    Args:
        clock: of the devices (default: the host's time for all).
        label: gives spans a name in profilers.
        skip, steps: which whole steps are kept, see :class:`Recording`.

    Raises:
        RuntimeError: a recording is already on.
    """
    global _story
    story = Recording(clock or _HostClock(), skip, steps)
    with _lock:
        if _story is not None:
            raise RuntimeError("a recording is already on: there is one per process")
        _story = story
        _show()
    try:
        with nullcontext() if label is None else labelled(label):
            yield story
    finally:
        _end(story)
        story.finish()


@contextmanager
def labelled(label: Label) -> Iterator[None]:
    """Gives all spans meanwhile a name in profilers; a recording that is on goes on."""
    with _lock:
        _labels.append(label)
        _show()
    try:
        yield
    finally:
        with _lock:
            _labels.remove(label)
            _show()
