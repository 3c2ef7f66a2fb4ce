"""Recordings of steps: made once per kind of batch, after a few ordinary steps, and replayed from then on.

This file records the work of one device, decides when, and which batches a graph serves, and words the reason where
there is none; ``cuda_graphs.py`` says which part of a step is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import torch

from mgpu_core._warnings import warn_user
from mgpu_core.device.streams import OWN_PRIORITY
from mgpu_core.nested import flatten

__all__ = ["GRAPH_DEVICE", "CudaRecorder", "CapturedStep", "StaticNest", "StepGraphs"]

GRAPH_DEVICE = "cuda"

WARM_UP = 3  # ordinary steps before a recording: kernels are chosen, memory and states allocated
KEPT = 4  # recordings; each holds the memory of a step
IDLE = 100  # steps for which an unused graph is kept while others wait for its slot
SEEN = 64  # kinds of batches that are being counted

_Work: TypeAlias = Callable[[], list[torch.Tensor]]
_PLAIN = {torch.Tensor}
_FIRST = "it is one of the first of its kind"
_CROWDED = f"{KEPT} other kinds of steps (shapes, modes, settings) are being replayed, and there is no room for more"
_NEW_LINE = "\n"


class StaticNest:
    """A nest of static tensors: a graph reads them, and they are filled before each replay.

    Args:
        nest: like those that it will be filled with.
        device: of its tensors; ``None``: each on the one where it is.

    Attributes:
        nest: to be recorded with.
    """

    def __init__(self, nest: tuple[Any, ...], device: torch.device | None = None) -> None:
        leaves: list[Any] = []
        tree = flatten(nest, leaves, "batch", whole=True)
        self._tensors = [each.detach().to(device or each.device, copy=True) for each in _tensors(leaves)]
        rest = iter(self._tensors)
        self.nest = tree.unflatten(iter([next(rest) if isinstance(each, torch.Tensor) else each for each in leaves]))

    def fill(self, nest: tuple[Any, ...]) -> None:
        """Copy the tensors of another nest, without gradients, into these, on their devices' current streams."""
        _, leaves = _taken_apart(nest)
        for static, given in zip(self._tensors, _tensors(leaves), strict=True):
            static.copy_(given, non_blocking=True)


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
        self._failed: dict[Hashable, str] = {}
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
        if key in self._failed:
            return self._failed[key]
        if not self._is_known(key):
            return _FIRST
        return None if self._has_room() else _CROWDED

    def _record(self, key: Hashable, record: Callable[[], CapturedStep]) -> str | None:
        try:
            self._captured[key] = record()
        except Exception as error:
            cause = error.__cause__ or error  # a rank's own, not how it was told
            self._failed[key] = f"recording it failed ({type(cause).__name__}: {str(cause).partition(_NEW_LINE)[0]})"
        return self._failed.get(key)

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


class CudaRecorder:
    """Records CUDA graphs; those of one device share a memory pool, since one is replayed at a time."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def record(self, device: torch.device, work: _Work) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        """Return the graph of all that ``work`` launches on one device, and where its results will lie.

        Other threads may use the GPUs meanwhile: their work is not recorded, and does not break the recording.
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
        """Make new pools after a step could not be recorded: these may be in any state."""
        self._pools.clear()
        self._streams.clear()


def _captured(
    graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any, stream: torch.cuda.Stream, work: _Work
) -> list[torch.Tensor]:
    # The outer one: some versions of torch leave the capture's stream current when a capture fails.
    with (
        torch.cuda.stream(torch.cuda.current_stream(device)),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        return work()


def _end_capture(device: torch.device, pool: Any) -> None:
    """Clean up after a failed capture, where torch does not.

    Torch (2.11) asks CUDA for the end of a capture first, and where that is an error, its allocator goes on to serve
    the graph's pool, and its generator takes all random numbers for a graph's: dropout would fail from then on.  The
    end of a capture that succeeds resets the generator.
    """
    with suppress(RuntimeError):  # torch had done so itself
        torch._C._cuda_endAllocateToPool(device.index, pool)
    with suppress(RuntimeError):  # the error to tell is the one before
        own_pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device, priority=OWN_PRIORITY)
        _captured(torch.cuda.CUDAGraph(), device, own_pool, stream, lambda: [torch.zeros((), device=device)])
