"""Inputs of which nothing is cut although something in them has rows, or tensors: said once.

A class with tensors that is no container this package opens; a list, an array or a function that holds as many
entries as the batch has rows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.layer_holders import contents_of
from mgpu_core.trees.nested import RankParts, Replicate, Rows

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
_FEWEST = 5  # entries that are taken for rows: fewer may well be a size, a shape, a range
_DEPTH = 3  # of objects in objects
_MOST = 64  # entries of a list that are looked into
_LISTS = (list, tuple, set, frozenset, deque)

_told: weakref.WeakSet[type] = weakref.WeakSet()
_told_paths: set[str] = set()


def warn_unknown(leaf: object, path: Callable[[], str], rows: int) -> None:
    """Warn once of a leaf that is not cut although it holds tensors, or reaches as many entries as there are rows.

    Args:
        path: returns the path of the leaf, for the warning.
        rows: of the batch; 0 if nothing is cut.
    """
    kind = type(leaf)
    if leaf is None or isinstance(leaf, _NO_CONTAINERS):
        return
    if not issubclass(kind, list | tuple | dict) and _holds_tensors(leaf):
        if kind in _told:
            return
        _told.add(kind)
        warn_user(
            f"{path()} is a {kind.__name__}, which holds tensors but is no container that mgpu_core knows: nothing of "
            f"it was split, and every rank gets it whole. mgpu_core.register_container({kind.__name__}, flatten, "
            "unflatten) makes it one; mgpu_core.Replicate(...) says that every rank should get it whole."
        )
    elif rows >= _FEWEST and _reaches(leaf, rows, _DEPTH) and path() not in _told_paths:
        _told_paths.add(path())
        warn_user(
            f"{path()} is a {kind.__name__} with {rows} entries, as many as there are rows, or holds such a thing: it "
            "was not split, and every rank gets all of it. mgpu_core.Rows(...) gives each rank the entries of its "
            "rows; mgpu_core.Replicate(...) says that every rank should get it whole."
        )


def _reaches(obj: Any, rows: int, depth: int) -> bool:
    """Return whether the object is a list, an array or a tensor with so many entries, or holds one."""
    shape = getattr(obj, "shape", None)
    if isinstance(shape, tuple):
        return bool(shape) and shape[0] == rows
    if isinstance(obj, _LISTS) and (len(obj) == rows or len(obj) > _MOST):
        return len(obj) == rows
    if not depth or obj is None or isinstance(obj, _NO_CONTAINERS):
        return False
    return any(_reaches(each, rows, depth - 1) for each in contents_of(obj))


def _holds_tensors(obj: object) -> bool:
    """Return whether its attributes or entries are tensors, or plain containers of such."""
    if isinstance(obj, FunctionType | MethodType | partial | ReferenceType):
        return False
    return any(map(_has_tensor, contents_of(obj)))


def _has_tensor(value: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, torch.Tensor)
