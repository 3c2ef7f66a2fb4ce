"""Objects among the arguments of a call, such as caches, of which every rank has its own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

__all__ = ["OfRanks", "contents_of", "copied_to", "has_tensors"]

_DEPTH = 8


class OfRanks(NamedTuple):
    """An object of rank 0's, which a caller has, and those of the other ranks.

    Attributes:
        object: a weak reference to rank 0's.
        others: by rank, from 1.
        contents: of rank 0's after the last call.
        was_written: a call has changed it.
    """

    object: weakref.ref[Any]
    others: list[Any]
    contents: list[Any]
    was_written: bool

    def is_alike(self, given: Any) -> bool:
        """Return whether an object has the contents of after the last call."""
        now = contents_of(given)
        return len(now) == len(self.contents) and all(map(_is_same, now, self.contents))


def contents_of(given: Any) -> list[Any]:
    """Return all that an object holds, at any depth: weak references to tensors with their versions, and values."""
    found: list[Any] = []
    _add_contents(given, found, set(), _DEPTH)
    return found


def has_tensors(given: Any) -> bool:
    """Return whether an object holds a tensor that is not empty."""
    return any(each.numel() for each in _tensors_of(given))


def copied_to(given: Any, device: torch.device) -> Any:
    """Return a deep copy of an object, with its tensors on a device.

    Raises:
        TypeError: it cannot be copied, or holds a tensor that requires grad, whose gradient would be one rank's.
    """
    tensors = _tensors_of(given)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise TypeError(
            f"a {type(given).__name__} among the arguments holds a tensor that requires grad: pass it itself"
        )
    memo: dict[int, Any] = {id(each): each.detach().to(device, copy=True) for each in tensors}
    try:
        return copy.deepcopy(given, memo)
    except Exception as error:
        raise TypeError(
            f"a {type(given).__name__} among the arguments cannot be copied for each rank: {error}"
        ) from error


def _tensors_of(given: Any) -> list[torch.Tensor]:
    return [tensor for each in contents_of(given) if isinstance(each, tuple) and (tensor := each[0]()) is not None]


def _add_contents(each: Any, found: list[Any], seen: set[int], depth: int) -> None:
    if isinstance(each, torch.Tensor):
        found.append((weakref.ref(each), -1 if each.is_inference() else each._version, tuple(each.shape)))
    elif isinstance(each, str | bytes | int | float | bool | None | torch.dtype | torch.device):
        found.append(each)
    elif depth and id(each) not in seen:
        seen.add(id(each))
        if isinstance(each, Mapping):
            inside: Any = (part for pair in each.items() for part in pair)
        elif isinstance(each, Sequence | Set):
            inside = each
        else:
            inside = vars(each).values() if hasattr(each, "__dict__") else ()
        for part in inside:
            _add_contents(part, found, seen, depth - 1)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0]() is other[0]() is not None and one[1:] == other[1:]
    return type(one) is type(other) and bool(one == other)
