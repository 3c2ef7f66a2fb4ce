"""Recordings of steps: made once per kind of batch, after a few ordinary steps, and replayed from then on.

This file decides when one is made, and which batches it serves, and words the reason where there is none;
``cuda_graphs.py`` says which part of a step is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import torch

from mgpu_core.devices.graphs import FIRST, Recordings
from mgpu_core.devices.transfer import copy_into
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.nested import flatten

__all__ = ["Replay", "StaticNest", "StepGraphs"]

WARM_UP = 3  # ordinary steps before a recording: kernels are chosen, memory and states allocated
KEPT = 4  # recordings; each holds the memory of a step
IDLE = 100  # steps for which an unused graph is kept while others wait for its slot

_PLAIN = {torch.Tensor}

Replay: TypeAlias = Callable[[tuple[Any, ...]], Any]
"""A function that replays the recording with a batch like the recorded one, and returns the result."""


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
        for static, tensor in zip(self._tensors, given, strict=True):
            copy_into(static, tensor)
        rest = iter(self._tensors)
        self.nest = tree.unflatten(iter([next(rest) if isinstance(each, torch.Tensor) else each for each in leaves]))

    def fill(self, nest: tuple[Any, ...]) -> None:
        """Copy the tensors of another nest, without gradients, into these, on their devices' current streams."""
        _, leaves = _taken_apart(nest)
        for static, given in zip(self._tensors, _tensors(leaves), strict=True):
            copy_into(static, given)


class StepGraphs(Recordings[Replay]):
    """The recordings of one step.

    Attributes:
        replays: steps that were replays so far.
    """

    def __init__(self) -> None:
        super().__init__(KEPT, idle=IDLE, warm_up=WARM_UP)
        self._told: set[str | None] = {FIRST, None}
        self.replays = 0

    def skip(self, reason: str) -> None:
        """Note why this step goes the ordinary way."""
        self.reason = reason

    def tell(self) -> None:
        """Warn why a step goes the ordinary way, once for each reason, at the line of the user's that called it."""
        if self.reason not in self._told:
            self._told.add(self.reason)
            warn_user(f"this step is not captured: {self.reason}")

    def run(self, batch: tuple[Any, ...], settings: Hashable, record: Callable[[], Replay]) -> Any:
        """Replay the step; return the result, or ``None``: it must go the ordinary way.

        Args:
            batch: a nest, of tuples and dicts at the top.
            settings: all else that a recording fixes.
            record: makes a recording that serves this batch, and all of its kind.
        """
        key = _key(batch, settings)
        if key is None:
            self.skip("the batch has a part that is neither a plain tensor nor a number, a text or None")
            return None
        replay = self.get(key)
        if replay is None and self.reason is None:
            replay = self.add(key, record)
        if replay is None:
            return None
        result = replay(batch)
        self.replays += 1
        return result


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
            return flatten(nest, leaves, "batch", whole=True).form, leaves
    return tuple(map(len, nest)), leaves


def _key(batch: tuple[Any, ...], settings: Hashable) -> Hashable | None:
    """Return the key of batches that one graph serves; ``None`` if no graph can serve this one."""
    kind, leaves = _taken_apart(batch)
    parts: list[Hashable] = [settings, kind]
    for leaf in leaves:
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.requires_grad:
            parts.append((leaf.shape, leaf.stride(), leaf.dtype))
        elif type(leaf) is float:
            parts.append((float, leaf.hex()))  # 0.0 is not -0.0, and NaN is NaN
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            parts.append((type(leaf), leaf))
        else:
            return None
    return tuple(parts)
