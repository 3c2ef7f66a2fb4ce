"""Recordings of steps: made once per kind of batch, after a few ordinary steps, and replayed from then on.

What a recording is, and how one is made, is nobody's business here (see ``captured.py``): this file knows when there
is one, which batches it serves, and what to tell the user where there is none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from mgpu_core.caller import warn_caller
from mgpu_core.nested import flatten

__all__ = ["GRAPH_DEVICE", "Recording", "StaticNest", "StepGraphs"]

GRAPH_DEVICE = "cuda"

WARM_UP = 3  # ordinary steps before a recording: kernels are chosen, memory and states allocated
KEPT = 4  # recordings; each holds the memory of a step
IDLE = 100  # steps that a recording is kept for without being replayed, where others wait for its place
SEEN = 64  # kinds of batches that are being counted

_PLAIN = {torch.Tensor}
_FIRST = "it is one of the first of its kind"
_CROWDED = f"{KEPT} other kinds of steps (shapes, modes, settings) are being replayed, and there is no room for more"
_NEW_LINE = "\n"


class StaticNest:
    """A nest whose tensors stay where they are: what a recording reads, filled anew before each replay.

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
        """Copies the tensors of another nest, without gradients, into these, on their devices' current streams."""
        _, leaves = _taken_apart(nest)
        for static, given in zip(self._tensors, _tensors(leaves), strict=True):
            static.copy_(given, non_blocking=True)


class Recording(Protocol):
    """A step that can be replayed."""

    def replay(self, batch: Any) -> torch.Tensor:
        """The loss of a batch like the recorded one, in memory of its own."""


class StepGraphs:
    """The recordings of one step.

    Attributes:
        replays: steps that were replays so far.
        reason: why the last step was none; ``None`` if it was one.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._failed: dict[Hashable, str] = {}
        self._recordings: dict[Hashable, Recording] = {}
        self._told = {_FIRST}
        self._steps = 0
        self._last_used: dict[Hashable, int] = {}  # of each recording the step
        self.replays = 0
        self.reason: str | None = _FIRST

    def clear(self) -> None:
        """Lets go of all recordings and their memory."""
        self._recordings.clear()
        self._last_used.clear()

    def skip(self, reason: str) -> None:
        """This step goes the ordinary way."""
        self.reason = reason

    def tell(self) -> None:
        """Says why a step goes the ordinary way, once for each reason, in the line of the user's that called it."""
        if self.reason is not None and self.reason not in self._told:
            self._told.add(self.reason)
            warn_caller(f"this step is not captured: {self.reason}")

    def run(self, batch: tuple[Any, ...], settings: Hashable, record: Callable[[], Recording]) -> torch.Tensor | None:
        """The loss of a replay; ``None``: this step must go the ordinary way.

        Args:
            batch: a nest, of tuples and dicts at the top.
            settings: all else that a recording fixes.
            record: makes a recording that serves this batch, and all of its kind.
        """
        self._steps += 1
        key = _key(batch, settings)
        if key is None:
            self.skip("the batch has a part that is neither a plain tensor nor a number, a text or None")
            return None
        recording = self._recordings.get(key) or self._recorded(key, record)
        if recording is None:
            return None
        self._last_used[key] = self._steps
        loss = recording.replay(batch)
        self.replays += 1
        self.reason = None
        return loss

    def _recorded(self, key: Hashable, record: Callable[[], Recording]) -> Recording | None:
        if key in self._failed:
            self.skip(self._failed[key])
            return None
        if not self._is_known(key):
            self.reason = _FIRST
            return None
        if not self._has_room():
            self.skip(_CROWDED)
            return None
        try:
            found = record()
        except Exception as error:
            cause = error.__cause__ or error  # a rank's own, not how it was told
            self._failed[key] = f"recording it failed ({type(cause).__name__}: {str(cause).partition(_NEW_LINE)[0]})"
            self.skip(self._failed[key])
            return None
        self._recordings[key], self._last_used[key] = found, self._steps
        return found

    def _has_room(self) -> bool:
        """Whether one more may be recorded; one that is not used any more makes room."""
        if len(self._recordings) < KEPT:
            return True
        oldest = min(self._last_used, key=self._last_used.__getitem__)
        if self._steps - self._last_used[oldest] <= IDLE:
            return False
        del self._recordings[oldest], self._last_used[oldest]
        return True

    def _is_known(self, key: Hashable) -> bool:
        """Whether enough steps of this kind were ordinary ones; counts."""
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return self._seen[key] > WARM_UP


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _taken_apart(nest: tuple[Any, ...]) -> tuple[Hashable, list[Any]]:
    """What says how a nest of tuples and dicts is built, and its leaves; of the usual ones without a walk."""
    leaves: list[Any] = []
    for part in nest:
        if type(part) is tuple and set(map(type, part)) <= _PLAIN:
            leaves += part
        elif part:
            leaves = []
            return tuple(flatten(nest, leaves, "batch", whole=True).paths("")), leaves
    return tuple(map(len, nest)), leaves


def _key(batch: tuple[Any, ...], settings: Hashable) -> Hashable | None:
    """What two batches must have in common to be served by one recording; ``None``: none could."""
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
