"""Are two results the same but for rounding?  Compared by the largest value of a tensor, not element by element."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from mgpu_core.trees.nested import Rows, flatten

__all__ = ["any_in_half", "difference", "equal", "tolerance"]

_HALF = (torch.float16, torch.bfloat16)


def any_in_half(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether one of the tensors is in half precision."""
    return any(each.dtype in _HALF for each in tensors)


def tolerance(*, half: bool) -> float:
    """Return how far results may lie apart, as a part of their largest value; ``half``: computed in half precision."""
    return 3e-2 if half else 1e-4


def difference(one: Any, other: Any, *, half: bool) -> str | None:
    """Return how a nest of outputs differs from the other one by more than rounding; ``None`` if it does not.

    Args:
        half: both were computed in half precision.
    """
    leaves: tuple[list[Any], list[Any]] = ([], [])
    trees = [flatten(each, found, "outputs", whole=True) for each, found in zip((one, other), leaves, strict=True)]
    if (reason := trees[0].difference(trees[1], "outputs")) is not None:
        return reason
    for path, mine, theirs in zip(trees[0].paths("outputs"), *leaves, strict=True):
        if isinstance(mine, Rows) and isinstance(theirs, Rows):
            text = difference(list(mine), list(theirs), half=half)
        else:
            text = _difference_of_leaves(mine, theirs, half=half)
        if text is not None:
            return f"{path} {text}"
    return None


def _difference_of_leaves(one: Any, other: Any, *, half: bool) -> str | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None if equal(one, other) else "is another object"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"has shape {tuple(one.shape)}, not {tuple(other.shape)}"
    wide = torch.complex128 if one.is_complex() else torch.float64
    mine, theirs = one.to(wide), other.to(wide)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    distance = torch.where(same, 0, mine - theirs).abs().max() if one.numel() else 0.0
    scale = torch.where(theirs.isfinite(), theirs, 0).abs().max() if one.numel() else 0.0
    if distance <= tolerance(half=half or any_in_half([one])) * scale:
        return None
    if math.isnan(float(distance)):
        return "differs: NaN in one, where the other has none"
    return f"differs by {float(distance):.3g}, of values up to {float(scale):.3g}"


def equal(one: Any, other: Any) -> bool:
    """Return whether two leaves that are no tensors are equal; False where they do not say so."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if one is other:
        return True
    try:
        if getattr(one, "shape", None) != getattr(other, "shape", None):
            return False
        same = one == other
        if hasattr(same, "all"):  # an array of answers
            same = same.all()
        return type(one) is type(other) and (bool(same) or bool(one != one and other != other))
    except (TypeError, ValueError, RuntimeError):  # no one answer
        return False
