"""The tracer: one flag, and the spans, marks and events that go into a trace buffer while it is up.

Each phase of a forward or backward pass opens a span.  Cuts, collectives and ready gradients emit events of their own.
With tracing off, the normal state, a span is one shared object that does nothing, and code that runs in every call
does not even ask for it: it tests :data:`sink` or :data:`recording`, as attributes of this module.
``mgpu_core.explain`` reads the buffer.  Every file may import this one.

An event belongs to a whole step.  Threads that the step starts inherit its number through ``contextvars``; work that
runs later, such as a backward, captures :func:`current_step` and re-enters it with :func:`in_step`.
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
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.support.warnings import warn_user
from mgpu_core.trace.buffer import Clock, Draft, TraceBuffer
from mgpu_core.trace.events import ALL_RANKS, INFERENCE, NO_BUCKET, NO_STEP, Event, Mark, Span

__all__ = [
    "WHOLE_STEPS",
    "current_step",
    "emit",
    "in_span",
    "in_step",
    "is_tracing",
    "labelled",
    "mark",
    "mark_devices",
    "span",
    "tracing",
    "when_tracing",
]


P = ParamSpec("P")
T = TypeVar("T")
Label: TypeAlias = Callable[[str], AbstractContextManager[object]]
_FORWARDS = ("data_parallel", "pipeline", "tensor_parallel")  # whose backward comes later
WHOLE_STEPS = ("train_step", *_FORWARDS, "place", "evaluate")


@dataclass(frozen=True, slots=True)
class Sink:
    """The destinations of a span: the trace buffer, and the names that profilers show."""

    buffer: TraceBuffer | None
    label: Label | None


_whole_step: ContextVar[int] = ContextVar("mgpu_core_whole_step", default=NO_STEP)

current_step = _whole_step.get
"""Return the number of the whole step that this thread works for, or ``NO_STEP``."""


class _InStep:
    """Set the whole step that this thread works for."""

    __slots__ = ("_number", "_token")

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        self._token: Token[int] = _whole_step.set(self._number)

    def __exit__(self, *_: object) -> None:
        _whole_step.reset(self._token)


class _OpenStep(_InStep):
    """Open a whole step now, and end it on exit."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: TraceBuffer, name: str) -> None:
        super().__init__(buffer.begin_step(name, has_backward=name in _FORWARDS and torch.is_grad_enabled()))
        self._buffer = buffer

    def __exit__(self, *_: object) -> None:
        self._buffer.end_step(self._number)
        super().__exit__()


class _OpenSpan:
    __slots__ = ("_begin", "_bucket", "_device", "_host_ns", "_label", "_rank", "_sink", "_step", "_whole")

    def __init__(self, sink: Sink, step: str, rank: int, device: torch.device | None, bucket: int) -> None:
        self._sink, self._step, self._rank, self._device, self._bucket = sink, step, rank, device, bucket

    def __enter__(self) -> None:
        sink = self._sink
        if sink.label is not None:
            self._label = sink.label(_label_of(self._step, self._rank, self._bucket))
            self._label.__enter__()
        if sink.buffer is not None:
            self._whole = _begun(sink.buffer, self._step)
            self._whole.__enter__()
            self._host_ns = time.perf_counter_ns()
            self._begin = _moment(sink.buffer, self._device)

    def __exit__(self, *error: object) -> None:
        sink = self._sink
        if sink.buffer is not None:
            end = _moment(sink.buffer, self._device)
            sink.buffer.add(_whole_step.get(), self._draft(end))
            self._whole.__exit__(None, None, None)
        if sink.label is not None:
            self._label.__exit__(*error)  # type: ignore[arg-type]

    def _draft(self, end: object) -> Draft:
        """Return a function that makes the event; it does not keep this object, whose label is profiler memory."""
        thread, begin_ns, end_ns = threading.get_ident(), self._host_ns, time.perf_counter_ns()
        step, rank, bucket, begin = self._step, self._rank, self._bucket, self._begin
        device = "" if self._device is None else str(self._device)

        def draft(clock: Clock) -> Span:
            on_device = begin is not None and end is not None
            times = (clock.ns(begin), clock.ns(end)) if on_device else (begin_ns, end_ns)
            return Span(step, rank, bucket, device, *times, begin_ns, end_ns, thread)

        return draft


def _begun(buffer: TraceBuffer, name: str) -> AbstractContextManager[None]:
    """Return the context of a new whole step; a null context inside another one, in whatever thread."""
    is_of_batch = name == "place" and _whole_step.get() == INFERENCE
    if name not in WHOLE_STEPS or is_of_batch or buffer.is_inside(_whole_step.get()):
        return NULL_CONTEXT
    if buffer.is_over():
        _end(buffer)
    return _OpenStep(buffer, name)


def _moment(buffer: TraceBuffer, device: torch.device | None) -> object:
    """Return a mark on the device's current stream; ``None`` where the host's time is used."""
    try:
        return None if device is None else buffer.clock.mark(device)
    except Exception as error:
        _fail(buffer, error)
        return None


def _label_of(step: str, rank: int, bucket: int) -> str:
    words = ["mgpu", step]
    if rank != ALL_RANKS:
        words.append(f"rank {rank}")
    if bucket != NO_BUCKET:
        words.append(f"bucket {bucket}")
    return " ".join(words)


recording: TraceBuffer | None = None
"""The flag of events: the buffer of the recording that is on, or ``None``."""
sink: Sink | None = None
"""The flag of spans: ``None`` while they do nothing, because no recording and no profiler names are on."""
# Both change: read them as attributes of this module, and do not import them by name.


def span(
    step: str, rank: int = ALL_RANKS, device: torch.device | None = None, bucket: int = NO_BUCKET
) -> AbstractContextManager[None]:
    """Return a context manager around one phase of a pass; it does nothing with tracing and profiler names off.

    Args:
        device: the device on which the work inside is launched, on this thread's current stream.
    """
    current_sink = sink
    return NULL_CONTEXT if current_sink is None else _OpenSpan(current_sink, step, rank, device, bucket)


def in_span(step: str, rank: int, device: torch.device, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function inside a span."""
    with span(step, rank, device):
        return call(*args, **kwargs)


def is_tracing() -> bool:
    """Return True while a trace is recorded.  Ask before computing the data of an event."""
    return recording is not None


def in_step(number: int) -> AbstractContextManager[None]:
    """Return a context manager in which events belong to the given whole step; a null context with tracing off.

    Args:
        number: the step's number; ``NO_STEP``: events inside belong to no step.
    """
    return NULL_CONTEXT if sink is None else _InStep(number)


def when_tracing(function: Callable[P, None]) -> Callable[P, None]:
    """Decorate a function that only serves tracing: it does nothing with tracing off.

    An error in it ends the recording, which warns at its end; the training step is not affected.
    """

    @wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> None:
        buffer = recording
        if buffer is None:
            return
        try:
            function(*args, **kwargs)
        except Exception as error:
            _fail(buffer, error)

    return traced


def emit(make: Callable[[int, int], Event]) -> None:
    """Add the event ``make(host_ns, thread)`` to the buffer, if tracing is on."""
    buffer = recording
    if buffer is not None:
        event = make(time.perf_counter_ns(), threading.get_ident())
        buffer.add(_whole_step.get(), lambda _clock: event)


def mark(
    step: str, rank: int = ALL_RANKS, device: torch.device | None = None, bucket: int = NO_BUCKET, text: str = ""
) -> None:
    """Emit a mark, on the device's current stream or in this thread, if tracing is on."""
    buffer = recording
    if buffer is None:
        return
    host_ns, thread = time.perf_counter_ns(), threading.get_ident()
    at = _moment(buffer, device)
    buffer.add(
        _whole_step.get(),
        lambda clock: Mark(step, rank, bucket, text, host_ns if at is None else clock.ns(at), host_ns, thread),
    )


def mark_devices(devices: Sequence[torch.device]) -> tuple[TraceBuffer, dict[str, object]] | None:
    """Return the buffer, and a mark on each device's current stream; ``None`` with tracing off."""
    buffer = recording
    if buffer is None:
        return None
    return buffer, {str(device): _moment(buffer, device) for device in dict.fromkeys(devices)}


_lock = threading.Lock()  # guards the labels and the flags; reading a flag takes no lock
_labels: list[Label] = []  # the last one is used


def _show() -> None:
    """Update the flag of spans."""
    global sink
    label = _labels[-1] if _labels else None
    sink = None if recording is None and label is None else Sink(recording, label)


def _end(buffer: TraceBuffer) -> None:
    """Stop filling the buffer, if it is still the current one; profiler names stay on."""
    global recording
    with _lock:
        if recording is buffer:
            recording = None
            _show()


def _fail(buffer: TraceBuffer, error: Exception) -> None:
    """End a recording because of an error in tracing; keep the first."""
    buffer.failure = buffer.failure or error
    _end(buffer)


def _forget_in_child() -> None:
    """Turn tracing off in a forked child, and replace the lock, whose holder does not exist there."""
    global recording, _lock
    if recording is not None:
        recording.forget_threads()
    recording, _lock = None, threading.Lock()
    _show()


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def tracing(
    clock: Clock | None = None, label: Label | None = None, *, skip: int = 0, steps: int | None = None
) -> Iterator[TraceBuffer]:
    """Record the events of all threads of this process inside a ``with`` block; yield the buffer.

    Args:
        clock: reads the devices' times (default: the host's time for all).
        label: makes the name of a span for profilers.
        skip, steps: the whole steps to keep, see :class:`TraceBuffer`.

    Raises:
        RuntimeError: a trace is already being recorded.
    """
    global recording
    buffer = TraceBuffer(clock or Clock(), skip, steps)
    try:
        with _lock:
            if recording is not None:
                raise RuntimeError(
                    "a recording is already on: there is one per process, and `mgpu explain` makes it of the whole "
                    "script"
                )
            recording = buffer
            _show()
        with NULL_CONTEXT if label is None else labelled(label):
            yield buffer
    finally:
        _end(buffer)
        buffer.finish()
        if buffer.failure is not None:
            warn_user(_why_it_ended(buffer.failure), RuntimeWarning)


def _why_it_ended(failure: Exception) -> str:
    reason = f"{type(failure).__name__}: {failure}"
    return f"the recording ended early, by an error of its own that no step has seen: {reason}"


@contextmanager
def labelled(label: Label) -> Iterator[None]:
    """Give all spans inside a name in profilers, whether or not a trace is recorded."""
    with _lock:
        _labels.append(label)
        _show()
    try:
        yield
    finally:
        with _lock:
            _labels.remove(label)
            _show()
