"""Inputs that hold tensors but are no container that this package opens: nothing of them is cut, which is said once."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core._warnings import warn_user
from mgpu_core.nested import RankParts, Replicate, Rows

__all__ = ["warn_unknown"]

_NO_CONTAINERS = (
    torch.Tensor,
    torch.nn.Module,
    PackedSequence,
    RankParts,
    Replicate,
    Rows,
    type,
    int,
    float,
    str,
    bytes,
)

_told: weakref.WeakSet[type] = weakref.WeakSet()


def warn_unknown(leaf: object, path: Callable[[], str]) -> None:
    """Warn, once for its class, of a leaf that holds tensors but is no container, so that nothing of it is cut.

    Args:
        path: returns the path of the leaf, for the warning.
    """
    kind = type(leaf)
    if leaf is None or isinstance(leaf, _NO_CONTAINERS) or kind in _told or not _holds_tensors(leaf):
        return
    _told.add(kind)
    warn_user(
        f"{path()} is a {kind.__name__}, which holds tensors but is no container that mgpu_core knows: nothing of it "
        f"was split, and every rank gets it whole. mgpu_core.register_container({kind.__name__}, flatten, unflatten) "
        "makes it one; mgpu_core.Replicate(...) says that every rank should get it whole."
    )


def _holds_tensors(obj: object) -> bool:
    """Return whether its attributes or entries are tensors, or plain containers of such."""
    values = [*getattr(obj, "__dict__", {}).values()]
    for kind in type(obj).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        values += [getattr(obj, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    if isinstance(obj, set | frozenset | deque):
        values += obj
    return any(map(_has_tensor, values))


def _has_tensor(value: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, torch.Tensor)
