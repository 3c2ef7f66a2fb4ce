"""Recordings of steps: made once per kind of batch, after a few ordinary steps, and replayed from then on.

This file decides when one is made, and which batches it serves, and words the reason where there is none;
``cuda_graphs.py`` says which part of a step is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from mgpu_core.devices.graphs import SEEN, FailedRecordings
from mgpu_core.devices.transfer import copy_into
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.nested import flatten

__all__ = ["CapturedStep", "StaticNest", "StepGraphs"]

WARM_UP = 3  # ordinary steps before a recording: kernels are chosen, memory and states allocated
KEPT = 4  # recordings; each holds the memory of a step
IDLE = 100  # steps for which an unused graph is kept while others wait for its slot

_PLAIN = {torch.Tensor}
_FIRST = "it is one of the first of its kind"
_CROWDED = f"{KEPT} other kinds of steps (shapes, modes, settings) are being replayed, and there is no room for more"


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
