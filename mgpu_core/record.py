"""What happened, for those who want to see it: one flag, and who is told while it is up.

Every step of a forward or backward pass opens a span; cuts, collectives and gradients that are ready leave entries of
their own.  With recording off, the normal state, a span is one shared object that does nothing.  Every file may import
this one; it imports ``recording``, ``entries`` and ``nothing`` alone.  ``mgpu_core.explain`` reads what was kept.

Work for a whole step is told as part of it.  Threads that the step starts know it by themselves, by their
``contextvars``; what comes later, as a backward does, takes :func:`current_step` along and comes back
:func:`in_step`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeAlias

import torch

from mgpu_core.caller import warn_caller
from mgpu_core.entries import ALL_RANKS, NO_BUCKET, NO_STEP, Entry, Mark, Span
from mgpu_core.nothing import NOTHING
from mgpu_core.recording import Clock, Draft, HostClock, Recording

__all__ = [
    "WHOLE_STEPS",
    "begin_marks",
    "current_step",
    "in_step",
    "is_on",
    "keep",
    "labelled",
    "mark",
    "rank_spans",
    "recording",
    "span",
    "telling",
]


P = ParamSpec("P")
Label: TypeAlias = Callable[[str], AbstractContextManager[object]]
WHOLE_STEPS = ("train_step", "data_parallel", "evaluate")


@dataclass(frozen=True, slots=True)
class _Sink:
    """Where spans go: into a recording, and into the names that profilers show."""

    story: Recording | None
    label: Label | None


_whole_step: ContextVar[int] = ContextVar("mgpu_core_whole_step", default=NO_STEP)


class _InStep:
    """Work for a whole step."""

    __slots__ = ("_number", "_token")

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        self._token: Token[int] = _whole_step.set(self._number)

    def __exit__(self, *_: object) -> None:
        _whole_step.reset(self._token)


class _WholeStep(_InStep):
    """The step itself, which began when this was made."""

    __slots__ = ("_story",)

    def __init__(self, story: Recording, name: str) -> None:
        super().__init__(story.begin_step(name))
        self._story = story

    def __exit__(self, *_: object) -> None:
        self._story.end_step(self._number)
        super().__exit__()


class _Span:
    __slots__ = ("_begin", "_bucket", "_device", "_host_ns", "_label", "_rank", "_sink", "_step", "_whole")

    def __init__(self, sink: _Sink, step: str, rank: int, device: torch.device | None, bucket: int) -> None:
        self._sink, self._step, self._rank, self._device, self._bucket = sink, step, rank, device, bucket

    def __enter__(self) -> None:
        sink = self._sink
        if sink.label is not None:
            self._label = sink.label(_label_of(self._step, self._rank, self._bucket))
            self._label.__enter__()
        if sink.story is not None:
            self._whole = _begun(sink.story, self._step)
            self._whole.__enter__()
            self._host_ns = time.perf_counter_ns()
            self._begin = _moment(sink.story, self._device)

    def __exit__(self, *error: object) -> None:
        sink = self._sink
        if sink.story is not None:
            end = _moment(sink.story, self._device)
            sink.story.add(_whole_step.get(), self._draft(end))
            self._whole.__exit__(None, None, None)
        if sink.label is not None:
            self._label.__exit__(*error)  # type: ignore[arg-type]

    def _draft(self, end: object) -> Draft:
        """Without the span itself: its label is memory of the profiler's, which would stay, from every step."""
        thread, begin_ns, end_ns = threading.get_ident(), self._host_ns, time.perf_counter_ns()
        step, rank, bucket, begin = self._step, self._rank, self._bucket, self._begin
        device = "" if self._device is None else str(self._device)

        def draft(clock: Clock) -> Span:
            on_device = begin is not None and end is not None
            times = (clock.ns(begin), clock.ns(end)) if on_device else (begin_ns, end_ns)
            return Span(step, rank, bucket, device, *times, begin_ns, end_ns, thread)

        return draft


def _begun(story: Recording, name: str) -> AbstractContextManager[None]:
    """Around a whole step, work for it; one inside another, in whatever thread, is none of its own."""
    if name not in WHOLE_STEPS or story.is_inside(_whole_step.get()):
        return NOTHING
    if story.is_over():
        _end(story)
    return _WholeStep(story, name)


def _moment(story: Recording, device: torch.device | None) -> object:
    """On the device's current stream; ``None``: the host's time will do."""
    try:
        return None if device is None else story.clock.mark(device)
    except Exception as error:
        _fail(story, error)
        return None


def _label_of(step: str, rank: int, bucket: int) -> str:
    words = ["mgpu", step]
    if rank != ALL_RANKS:
        words.append(f"rank {rank}")
    if bucket != NO_BUCKET:
        words.append(f"bucket {bucket}")
    return " ".join(words)


_sink: _Sink | None = None  # the flag


def span(
    step: str, rank: int = ALL_RANKS, device: torch.device | None = None, bucket: int = NO_BUCKET
) -> AbstractContextManager[None]:
    """Return a context manager around one step of a pass; it does nothing when nobody listens.

    Args:
        device: where the work runs that is launched inside, on the current stream of this thread.
    """
    sink = _sink
    return NOTHING if sink is None else _Span(sink, step, rank, device, bucket)


def rank_spans(rank: int, device: torch.device) -> tuple[AbstractContextManager[None], ...]:
    """Return the spans of a rank's forward, loss and backward; none of them does anything when nobody wants to know."""
    if _sink is None:
        return _NO_SPANS
    return tuple(span(step, rank, device) for step in ("forward", "loss", "backward"))


_NO_SPANS = (NOTHING, NOTHING, NOTHING)


def is_on() -> bool:
    """Return whether a recording is on: ask before computing what only an entry needs."""
    sink = _sink
    return sink is not None and sink.story is not None


def current_step() -> int:
    """Return the number of the whole step that this thread works for; ``NO_STEP``."""
    return _whole_step.get()


def in_step(number: int) -> AbstractContextManager[None]:
    """Return a context manager around what is part of a whole step though it comes later; nothing when nobody is told.

    Args:
        number: of the step; ``NO_STEP``: part of none, wherever it happens.
    """
    return NOTHING if _sink is None else _InStep(number)


def telling(tell: Callable[P, None]) -> Callable[P, None]:
    """Return a decorator for what is done for a recording alone: nothing when none is on.

    An error in it ends the recording, which says so at its end; the step goes on as if nobody had looked.
    """

    @wraps(tell)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        sink = _sink
        if sink is None or sink.story is None:
            return
        try:
            tell(*args, **kwargs)
        except Exception as error:
            _fail(sink.story, error)

    return told


def keep(make: Callable[[int, int], Entry]) -> None:
    """Add ``make(host_ns, thread)`` to the recording, if one is on."""
    sink = _sink
    if sink is not None and sink.story is not None:
        entry = make(time.perf_counter_ns(), threading.get_ident())
        sink.story.add(_whole_step.get(), lambda _clock: entry)


def mark(
    step: str, rank: int = ALL_RANKS, device: torch.device | None = None, bucket: int = NO_BUCKET, text: str = ""
) -> None:
    """Record a moment, on the device's current stream or in this thread, if a recording is on."""
    sink = _sink
    if sink is None or sink.story is None:
        return
    host_ns, thread = time.perf_counter_ns(), threading.get_ident()
    at = _moment(sink.story, device)
    sink.story.add(
        _whole_step.get(),
        lambda clock: Mark(step, rank, bucket, text, host_ns if at is None else clock.ns(at), host_ns, thread),
    )


def begin_marks(devices: Sequence[torch.device]) -> tuple[Recording, dict[str, object]] | None:
    """Return the recording, and a mark on each device's current stream; ``None`` when no recording is on."""
    sink = _sink
    if sink is None or sink.story is None:
        return None
    return sink.story, {str(device): _moment(sink.story, device) for device in dict.fromkeys(devices)}


_lock = threading.Lock()  # of the three below; whoever only looks at the flag takes none
_story: Recording | None = None
_labels: list[Label] = []  # the last one names


def _show() -> None:
    """Bring the flag up to what is on."""
    global _sink
    label = _labels[-1] if _labels else None
    _sink = None if _story is None and label is None else _Sink(_story, label)


def _end(story: Recording) -> None:
    """Take the recording away, if it is still this one; names for profilers stay as long as who wants them."""
    global _story
    with _lock:
        if _story is story:
            _story = None
            _show()


def _fail(story: Recording, error: Exception) -> None:
    """End a recording because of an error of its own, the first one."""
    story.failure = story.failure or error
    _end(story)


def _forget_in_child() -> None:
    """A forked child's steps are no part of its parent's recording; and nobody there holds the lock."""
    global _story, _lock
    if _story is not None:
        _story.forget_threads()
    _story, _lock = None, threading.Lock()
    _show()


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def recording(
    clock: Clock | None = None, label: Label | None = None, *, skip: int = 0, steps: int | None = None
) -> Iterator[Recording]:
    """Record everything that the process does meanwhile, in all its threads.

    Args:
        clock: of the devices (default: the host's time for all).
        label: gives spans a name in profilers.
        skip, steps: which whole steps are kept, see :class:`Recording`.

    Raises:
        RuntimeError: a recording is already on.
    """
    global _story
    story = Recording(clock or HostClock(), skip, steps)
    try:
        with _lock:
            if _story is not None:
                raise RuntimeError(
                    "a recording is already on: there is one per process, and `mgpu explain` makes it of the whole "
                    "script"
                )
            _story = story
            _show()
        with NOTHING if label is None else labelled(label):
            yield story
    finally:
        _end(story)
        story.finish()
        if story.failure is not None:
            warn_caller(_why_it_ended(story.failure), RuntimeWarning)


def _why_it_ended(failure: Exception) -> str:
    reason = f"{type(failure).__name__}: {failure}"
    return f"the recording ended early, by an error of its own that no step has seen: {reason}"


@contextmanager
def labelled(label: Label) -> Iterator[None]:
    """Give all spans meanwhile a name in profilers; a recording that is on goes on."""
    with _lock:
        _labels.append(label)
        _show()
    try:
        yield
    finally:
        with _lock:
            _labels.remove(label)
            _show()
