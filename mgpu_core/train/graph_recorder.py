"""What records the work of a device as a graph: CUDA's, and its end where a recording fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from mgpu_core.device.streams import OWN_PRIORITY

__all__ = ["CudaRecorder", "Launch", "Recorder"]

_T = TypeVar("_T")
Work: TypeAlias = Callable[[], list[torch.Tensor]]


class Launch(Protocol):
    """What one device did while it was recorded."""

    def replay(self) -> None:
        """Does it again, in the same memory, on the device's current stream."""


class Recorder(Protocol):
    """What records the work of a device."""

    def record(self, device: torch.device, work: Work) -> tuple[Launch, list[torch.Tensor]]:
        """All that ``work`` launches on one device, and where its results will lie."""

    def forget(self) -> None:
        """After a step could not be recorded: what is recorded next has nothing to do with it."""


class CudaRecorder:
    """Records CUDA graphs; those of one device share a memory pool, since one is replayed at a time."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def record(self, device: torch.device, work: Work) -> tuple[Launch, list[torch.Tensor]]:
        """The graph of all that ``work`` launches on one device, and where its results will lie.

        Other threads may use the GPUs meanwhile: what they do is not recorded, and does not break the recording.
        """
        with torch.cuda.device(device):
            if device not in self._pools:
                self._pools[device] = torch.cuda.graph_pool_handle()
                # torch's own stream for captures is one for the process, on the first device that had one.
                self._streams[device] = torch.cuda.Stream(device, priority=OWN_PRIORITY)
            graph = torch.cuda.CUDAGraph()
            pool, stream = self._pools[device], self._streams[device]
            try:
                results = _captured(graph, device, pool, stream, work)
            except BaseException:
                _end_capture(device, pool)
                raise
            return graph, results

    def forget(self) -> None:
        """After a step could not be recorded: its pools may be in any state."""
        self._pools.clear()
        self._streams.clear()


def _captured(
    graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any, stream: torch.cuda.Stream, work: Callable[[], _T]
) -> _T:
    # The outer one: some versions of torch leave the capture's stream current when a capture fails.
    with (
        torch.cuda.stream(torch.cuda.current_stream(device)),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        return work()


def _end_capture(device: torch.device, pool: Any) -> None:
    """After a capture that failed, does what torch leaves out then.

    Torch (2.11) asks CUDA for the end of a capture first, and where that is an error, its allocator goes on to serve
    the graph's pool, and its generator takes all random numbers for a graph's: dropout would fail from then on.  The
    end of a capture that succeeds resets the generator.
    """
    with suppress(RuntimeError):  # torch had done so itself
        torch._C._cuda_endAllocateToPool(device.index, pool)
    with suppress(RuntimeError):  # the error to tell is the one before
        own_pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device, priority=OWN_PRIORITY)
        _captured(torch.cuda.CUDAGraph(), device, own_pool, stream, lambda: torch.zeros((), device=device))
