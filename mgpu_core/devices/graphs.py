"""Recordings of CUDA graphs: one at a time in the process; which are made and kept, and when one is tried again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from mgpu_core.devices.exclusive import Exclusive
from mgpu_core.devices.streams import CaptureStream, on

__all__ = ["GRAPH_DEVICE", "CudaRecorder", "GraphEvent", "Recording", "Recordings"]

GRAPH_DEVICE = "cuda"

FIRST = "it is one of the first of its kind"
SEEN = 64  # kinds of batches that are being counted
ATTEMPTS = 3  # at recording a kind: what made one fail may be over
RETRY_AFTER = 16  # calls of a kind between two attempts

T = TypeVar("T")
_Work: TypeAlias = Callable[[], list[torch.Tensor]]
_NEW_LINE = "\n"
_CAPTURE_HINT = (
    "; besides a module that waits for the GPU (item(), print, a copy to the host), a loss that is kept with its graph "
    "over the same parameters can be the cause, or a thread that waits for the whole device"
)


@dataclass(slots=True)
class _Failure:
    reason: str
    attempts: int = 0
    calls: int = 0  # since the last attempt


class Recordings(Generic[T]):
    """The recordings of one owner: one per kind of call, made when it may be, and kept while it is used.

    One that fails is tried again: its cause may be over, such as another thread that waited for the device, a loss that
    was kept with its graph, memory that was short.  After :data:`ATTEMPTS` attempts the kind is given up.

    Args:
        kept: how many are kept at most.
        idle: calls for which an unused one is kept while others wait for its place.
        warm_up: ordinary calls of a kind before it is recorded.

    Attributes:
        reason: why the last call had no recording; ``None`` if it had one.
    """

    def __init__(self, kept: int, *, idle: int = 0, warm_up: int = 0) -> None:
        self._kept, self._idle, self._warm_up = kept, idle, warm_up
        self._recorded: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()  # with the number of their last call
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._failed: OrderedDict[Hashable, _Failure] = OrderedDict()
        self._calls = 0
        self.reason: str | None = FIRST

    def __len__(self) -> int:
        return len(self._recorded)

    def clear(self) -> None:
        """Drop all recordings and their memory."""
        self._recorded.clear()

    def get(self, key: Hashable) -> T | None:
        """Count a call of a kind; return its recording.

        ``None``: there is none, and this call goes the ordinary way, or is recorded by :meth:`add` if there is no
        reason against it.
        """
        self._calls += 1
        if key not in self._recorded:
            self.reason = self._why_not(key)
            return None
        recording, _ = self._recorded.pop(key)
        self._recorded[key] = recording, self._calls
        self.reason = None
        return recording

    def add(self, key: Hashable, record: Callable[[], T]) -> T | None:
        """Return the recording that ``record`` makes; ``None`` if it fails: this call goes the ordinary way."""
        try:
            recording = record()
        except Exception as error:
            self.reason = self._fail(key, error)
            return None
        self._recorded[key] = recording, self._calls
        return recording

    def _why_not(self, key: Hashable) -> str | None:
        """Return why a call of a kind may not be recorded now."""
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        if self._seen[key] <= self._warm_up:
            return FIRST
        if (failure := self._failed.get(key)) is not None:
            failure.calls += 1
            if failure.attempts >= ATTEMPTS or failure.calls <= RETRY_AFTER:
                return failure.reason
        if len(self._recorded) >= self._kept:
            oldest, (_, last) = next(iter(self._recorded.items()))
            if self._calls - last <= self._idle:
                return f"{self._kept} other kinds (shapes, modes, settings) are being replayed, and no more are kept"
            del self._recorded[oldest]
        return None

    def _fail(self, key: Hashable, error: BaseException) -> str:
        """Note that an attempt at a kind has failed; return the reason."""
        cause = error.__cause__ or error  # a rank's own, not how it was told
        first_line = str(cause).partition(_NEW_LINE)[0]
        hint = _CAPTURE_HINT if "captur" in first_line.lower() else ""
        reason = f"recording it failed ({type(cause).__name__}: {first_line}){hint}"
        attempts = self._failed[key].attempts if key in self._failed else 0
        self._failed[key] = _Failure(reason, attempts + 1)
        if len(self._failed) > SEEN:
            self._failed.popitem(last=False)
        return reason


# CUDA allows one recording in a process at a time: whoever else comes, waits.
_recording = Exclusive("another recording of a CUDA graph did not end")


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


class GraphEvent:
    """An event that each replay of a graph records, and that work outside of the graph can wait for."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(external=True)

    def record(self, stream: torch.Stream) -> None:
        """Let replays record it after the work that a stream has so far, in a recording."""
        self._event.record(_on_cuda(stream))

    def wait(self, stream: torch.Stream) -> None:
        """Make a stream wait until the replay that was launched last has recorded it."""
        self._event.wait(_on_cuda(stream))


@lru_cache(maxsize=256)
def _on_cuda(stream: torch.Stream) -> torch.cuda.Stream:
    """Return a stream as the class that CUDA's events take."""
    return torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


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

    event = GraphEvent

    def __init__(self) -> None:
        self._pools: dict[torch.device, _Pool] = {}

    def record(self, device: torch.device, work: _Work) -> tuple[Recording, list[torch.Tensor]]:
        """Return the graph of all that ``work`` launches on one device, and where its results will lie.

        Raises:
            Error: another recording did not end in time, or no stream is left.
        """
        with _recording.enter():
            if device not in self._pools:
                self._pools[device] = _Pool(device)
            pool = self._pools[device]
            recording = Recording(torch.cuda.CUDAGraph(), pool.stream)
            try:
                return recording, _captured(recording.graph, device, pool, work)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # the allocator gives back nothing while it serves a capture
                raise

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
