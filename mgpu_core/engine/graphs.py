"""Whole steps as CUDA graphs: recorded once per shape of the batch, replayed with one launch.

What a graph holds is what the device does between two updates: forward, loss, backward, the sums, the update.  What
the host does for each update (counts, settings, what the user sees) is done for each replay, around it.  A recording
computes nothing; numbers that change from step to step lie in the device's memory, and those that the recording has
fixed are part of its key: shapes, modes, the loss scale.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mgpu_core.nested import Tree, flatten

__all__ = ["GRAPH_DEVICE", "CudaRecorder", "Replayable", "StepGraphs"]

GRAPH_DEVICE = "cuda"

WARM_UP = 3  # ordinary steps before a recording: kernels are chosen, memory and states allocated
KEPT = 4  # graphs; each holds the memory of a step

_FIRST = "it is one of the first of its kind"
_NEW_LINE = "\n"

Work = Callable[[Any], torch.Tensor]


class Replayable(Protocol):
    """A recording."""

    def replay(self) -> None:
        """Does again what was recorded, in the same memory, on the current stream."""


class CudaRecorder:
    """Records CUDA graphs on one device; all of them share a memory pool, since one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Replayable, torch.Tensor]:
        """The graph of all that ``work`` launches, and where its result will lie.

        Other threads may use the GPU meanwhile: what they do is not recorded, and does not break the recording.
        """
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
            return graph, result


@dataclass(slots=True)
class _Recording:
    graph: Replayable
    inputs: list[torch.Tensor]
    loss: torch.Tensor


class StepGraphs:
    """The graphs of one step.

    Args:
        device: of all its ranks.
        recorder: what records.

    Attributes:
        replays: steps that were replays so far.
        reason: why the last step was none; ``None`` if it was one.
    """

    def __init__(self, device: torch.device, recorder: Any = None) -> None:
        self._device = device
        self._recorder = CudaRecorder(device) if recorder is None else recorder
        self._seen: Counter[Hashable] = Counter()
        self._failed: dict[Hashable, str] = {}
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._told: set[str] = set()
        self.replays = 0
        self.reason: str | None = _FIRST

    def clear(self) -> None:
        """Lets go of all graphs and their memory."""
        self._recordings.clear()

    def skip(self, reason: str) -> None:
        """This step goes the ordinary way; says why, once."""
        self.reason = reason
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(f"this step is not captured: {reason}", stacklevel=7)

    def run(self, batch: Any, settings: Hashable, work: Work) -> torch.Tensor | None:
        """The loss of a replay; ``None``: this step must go the ordinary way.

        Args:
            batch: a nest; its tensors are copied to where the recording reads them.
            settings: all else that a recording fixes.
            work: what is recorded: from a batch like this one to the loss.  Called once per recording.
        """
        leaves: list[Any] = []
        tree = flatten(batch, leaves, "batch", whole=True)
        key = _key(leaves, tree, settings)
        if key is None:
            self.skip("the batch has a part that is neither a plain tensor nor a number, a text or None")
            return None
        recording = self._recordings.get(key) or self._recorded(key, leaves, tree, work)
        if recording is None:
            return None
        self._recordings.move_to_end(key)
        with torch.no_grad():
            for static, given in zip(recording.inputs, _tensors(leaves), strict=True):
                static.copy_(given, non_blocking=True)
        recording.graph.replay()
        self.replays += 1
        self.reason = None
        return recording.loss.clone()

    def _recorded(self, key: Hashable, leaves: Sequence[Any], tree: Tree, work: Work) -> _Recording | None:
        self._seen[key] += 1
        if self._seen[key] <= WARM_UP:
            self.reason = _FIRST
            return None
        if key in self._failed:
            self.skip(self._failed[key])
            return None
        inputs = [each.detach().to(self._device, copy=True) for each in _tensors(leaves)]
        rest = iter(inputs)
        statics = [next(rest) if isinstance(each, torch.Tensor) else each for each in leaves]
        try:
            graph, loss = self._recorder.record(lambda: work(tree.unflatten(iter(statics))))
        except Exception as error:
            cause = error.__cause__ or error  # a rank's own, not how it was told
            self._failed[key] = f"recording it failed ({type(cause).__name__}: {str(cause).partition(_NEW_LINE)[0]})"
            self.skip(self._failed[key])
            return None
        while len(self._recordings) >= KEPT:
            self._recordings.popitem(last=False)
        found = self._recordings[key] = _Recording(graph, inputs, loss)
        return found


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _key(leaves: Sequence[Any], tree: Tree, settings: Hashable) -> Hashable | None:
    """What two batches must have in common to be replayed by one graph; ``None``: no graph could."""
    parts: list[Hashable] = [settings, *tree.paths("")]
    for each in leaves:
        if type(each) is torch.Tensor and each.layout is torch.strided and not each.requires_grad:
            parts.append((tuple(each.shape), each.dtype))
        elif each is None or isinstance(each, bool | int | float | str):
            parts.append((type(each), each))
        else:
            return None
    return tuple(parts)
