"""Recordings of steps: made once per kind of batch, after a few ordinary steps, and replayed from then on.

This file records the work of one device, decides when, and which batches a graph serves, and words the reason where
there is none; ``cuda_graphs.py`` says which part of a step is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, TypeAlias

import torch

from mgpu_core.devices.streams import CaptureStream, on
from mgpu_core.devices.time_limits import time_limit
from mgpu_core.devices.transfer import copy_into
from mgpu_core.errors import Error
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.nested import flatten

__all__ = ["GRAPH_DEVICE", "CudaRecorder", "CapturedStep", "FailedRecordings", "Recording", "StaticNest", "StepGraphs"]

GRAPH_DEVICE = "cuda"

WARM_UP = 3  # ordinary steps before a recording: kernels are chosen, memory and states allocated
KEPT = 4  # recordings; each holds the memory of a step
IDLE = 100  # steps for which an unused graph is kept while others wait for its slot
SEEN = 64  # kinds of batches that are being counted
ATTEMPTS = 3  # at recording a kind: what made one fail may be over
RETRY_AFTER = 16  # calls of a kind between two attempts

_Work: TypeAlias = Callable[[], list[torch.Tensor]]
_PLAIN = {torch.Tensor}
_FIRST = "it is one of the first of its kind"
_CROWDED = f"{KEPT} other kinds of steps (shapes, modes, settings) are being replayed, and there is no room for more"
_NEW_LINE = "\n"
_CAPTURE_HINT = (
    "; besides a module that waits for the GPU (item(), print, a copy to the host), a loss that is kept with its graph "
    "over the same parameters can be the cause, or a thread that waits for the whole device"
)


class StaticNest:
    """A nest of static tensors: a graph reads them, and they are filled before each replay.

    Args:
        nest: like those that it will be filled with.
        device: of its tensors.

    Attributes:
        nest: to be recorded with.
    """

    def __init__(self, nest: tuple[Any, ...], device: torch.device) -> None:
        leaves: list[Any] = []
        tree = flatten(nest, leaves, "batch", whole=True)
        given = [each.detach() for each in _tensors(leaves)]
        self._tensors = [torch.empty_like(each, device=device) for each in given]
        for static, each in zip(self._tensors, given, strict=True):
            copy_into(static, each)
        rest = iter(self._tensors)
        self.nest = tree.unflatten(iter([next(rest) if isinstance(each, torch.Tensor) else each for each in leaves]))

    def fill(self, nest: tuple[Any, ...]) -> None:
        """Copy the tensors of another nest, without gradients, into these, on their devices' current streams."""
        _, leaves = _taken_apart(nest)
        for static, given in zip(self._tensors, _tensors(leaves), strict=True):
            copy_into(static, given)


@dataclass(slots=True)
class _Failure:
    reason: str
    attempts: int = 0
    calls: int = 0  # since the last attempt


class FailedRecordings:
    """Kinds of calls that could not be recorded, and when each is tried again.

    A cause may be over by the next attempt: another thread that waited for the device, a loss that was kept with its
    graph, memory that was short.  After :data:`ATTEMPTS` attempts the kind is given up.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[Hashable, _Failure] = OrderedDict()

    def why_not(self, key: Hashable) -> str | None:
        """Count a call of a kind; return why it is not to be recorded, ``None`` if it may be."""
        failure = self._of.get(key)
        if failure is None:
            return None
        failure.calls += 1
        is_due = failure.attempts < ATTEMPTS and failure.calls > RETRY_AFTER
        return None if is_due else failure.reason

    def add(self, key: Hashable, error: BaseException) -> str:
        """Note that an attempt at a kind has failed; return the reason."""
        cause = error.__cause__ or error  # a rank's own, not how it was told
        first_line = str(cause).partition(_NEW_LINE)[0]
        hint = _CAPTURE_HINT if "captur" in first_line.lower() else ""
        reason = f"recording it failed ({type(cause).__name__}: {first_line}){hint}"
        attempts = self._of[key].attempts if key in self._of else 0
        self._of[key] = _Failure(reason, attempts + 1)
        if len(self._of) > SEEN:
            self._of.popitem(last=False)
        return reason


class CapturedStep(Protocol):
    """A step that can be replayed."""

    def replay(self, batch: Any) -> torch.Tensor:
        """Make the step with a batch like the recorded one; return its loss, in memory of its own."""


class StepGraphs:
    """The recordings of one step.

    Attributes:
        replays: steps that were replays so far.
        reason: why the last step was none; ``None`` if it was one.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._failed = FailedRecordings()
        self._captured: dict[Hashable, CapturedStep] = {}
        self._told = {_FIRST}
        self._steps = 0
        self._last_used: dict[Hashable, int] = {}  # of each recording the step
        self.replays = 0
        self.reason: str | None = _FIRST

    def clear(self) -> None:
        """Drop all recordings and their memory."""
        self._captured.clear()
        self._last_used.clear()

    def skip(self, reason: str) -> None:
        """Note why this step goes the ordinary way."""
        self.reason = reason

    def tell(self) -> None:
        """Warn why a step goes the ordinary way, once for each reason, at the line of the user's that called it."""
        if self.reason is not None and self.reason not in self._told:
            self._told.add(self.reason)
            warn_user(f"this step is not captured: {self.reason}")

    def run(
        self, batch: tuple[Any, ...], settings: Hashable, record: Callable[[], CapturedStep]
    ) -> torch.Tensor | None:
        """Replay the step; return its loss, or ``None``: it must go the ordinary way.

        Args:
            batch: a nest, of tuples and dicts at the top.
            settings: all else that a recording fixes.
            record: makes a recording that serves this batch, and all of its kind.
        """
        self._steps += 1
        key = _key(batch, settings)
        if key not in self._captured:
            self.reason = self._why_not(key) or self._record(key, record)
            if self.reason is not None:
                return None
        self._last_used[key] = self._steps
        loss = self._captured[key].replay(batch)
        self.replays += 1
        self.reason = None
        return loss

    def _why_not(self, key: Hashable) -> str | None:
        """Return why a step of this kind may not be recorded now."""
        if key is None:
            return "the batch has a part that is neither a plain tensor nor a number, a text or None"
        if not self._is_known(key):
            return _FIRST
        return self._failed.why_not(key) or (None if self._has_room() else _CROWDED)

    def _record(self, key: Hashable, record: Callable[[], CapturedStep]) -> str | None:
        try:
            self._captured[key] = record()
        except Exception as error:
            return self._failed.add(key, error)
        return None

    def _has_room(self) -> bool:
        """Return whether one more may be recorded; one that is not used any more makes room."""
        if len(self._captured) < KEPT:
            return True
        oldest = min(self._last_used, key=self._last_used.__getitem__)
        if self._steps - self._last_used[oldest] <= IDLE:
            return False
        del self._captured[oldest], self._last_used[oldest]
        return True

    def _is_known(self, key: Hashable) -> bool:
        """Count this step; return whether enough of its kind were ordinary ones."""
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return self._seen[key] > WARM_UP


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _taken_apart(nest: tuple[Any, ...]) -> tuple[Hashable, list[Any]]:
    """Return how a nest of tuples and dicts is built, and its leaves; of the usual ones without a walk."""
    leaves: list[Any] = []
    for part in nest:
        if type(part) is tuple and set(map(type, part)) <= _PLAIN:
            leaves += part
        elif part:
            leaves = []
            return tuple(flatten(nest, leaves, "batch", whole=True).paths("")), leaves
    return tuple(map(len, nest)), leaves


def _key(batch: tuple[Any, ...], settings: Hashable) -> Hashable | None:
    """Return the key of batches that one graph serves; ``None`` if no graph can serve this one."""
    kind, leaves = _taken_apart(batch)
    parts: list[Hashable] = [settings, kind]
    for each in leaves:
        if type(each) is torch.Tensor and each.layout is torch.strided and not each.requires_grad:
            parts.append((tuple(each.shape), each.dtype))
        elif each is None or isinstance(each, bool | int | float | str):
            parts.append((type(each), each))
        else:
            return None
    return tuple(parts)


# CUDA allows one recording in a process at a time: whoever else comes, waits.
_recording = Lock()


class Recording:
    """A CUDA graph, with the stream on which it was captured.

    Attributes:
        graph: the graph.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: CaptureStream) -> None:
        self.graph, self._stream = graph, stream

    def replay(self) -> None:
        """Launch it on the current stream."""
        self.graph.replay()

    def __del__(self) -> None:
        del self.graph  # before its stream is given back


class _Pool:
    """The memory of graphs of one device, and their stream."""

    def __init__(self, device: torch.device) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.stream = CaptureStream(device.index)


class CudaRecorder:
    """Records CUDA graphs; those of one device share a memory pool and a stream, since one is replayed at a time.

    Nothing in a recording waits for the device, and other threads may use the GPUs meanwhile: their work is on other
    streams, so that it is not recorded and does not invalidate the recording::

        this thread      [waits for the lock] ─ begin ─ work() ─ end ─ replay ─ ...
        capture stream                          [ recorded, not run ]
        other threads    steps, requests, copies on their own streams; a recording of theirs waits for the lock
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, _Pool] = {}

    def record(self, device: torch.device, work: _Work) -> tuple[Recording, list[torch.Tensor]]:
        """Return the graph of all that ``work`` launches on one device, and where its results will lie.

        Raises:
            Error: another recording did not end in time, or no stream is left.
        """
        seconds = time_limit()
        if not _recording.acquire(timeout=seconds):
            raise Error(f"another recording of a CUDA graph did not end within {seconds:g} s")
        try:
            if device not in self._pools:
                self._pools[device] = _Pool(device)
            pool = self._pools[device]
            recording = Recording(torch.cuda.CUDAGraph(), pool.stream)
            return recording, _captured(recording.graph, device, pool, work)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # the allocator gives back nothing while it serves a capture
            raise
        finally:
            _recording.release()

    def forget(self) -> None:
        """Make new pools, with new streams, after a step could not be recorded: these may be in any state."""
        self._pools.clear()


def _captured(graph: torch.cuda.CUDAGraph, device: torch.device, pool: _Pool, work: _Work) -> list[torch.Tensor]:
    """Record ``work``.

    Not by ``torch.cuda.graph``, which waits for the whole device first: that would invalidate the captures of others.
    """
    with on(device, pool.stream.stream):
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            results = work()
        except BaseException:
            with suppress(RuntimeError):  # the error to tell is the one before
                _end(graph, device, pool.handle)
            raise
        _end(graph, device, pool.handle)
        return results


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a capture, and clean up after one that was invalidated, where torch does not.

    Torch (2.11) asks CUDA for the end of a capture first, and where that is an error, its allocator goes on to serve
    the graph's pool and never frees it, and its generator takes all random numbers for a graph's: dropout would fail
    from then on.  The end of a capture that succeeds resets the generator.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # torch had done so itself
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        with suppress(RuntimeError):  # the error to tell is the one before
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.zeros((), device=device)
            empty.capture_end()
        raise
