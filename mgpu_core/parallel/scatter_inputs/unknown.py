"""Inputs of which nothing is cut although something in them has rows, or tensors: said once.

A class with tensors that is no container this package opens; a list, an array or a function that holds as many
entries as the batch has rows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

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
_FEWEST = 5  # entries that are taken for rows: fewer may well be a size, a shape, a range
_DEPTH = 3  # of objects in objects

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
    if kind not in _told and not issubclass(kind, list | tuple | dict) and _holds_tensors(leaf):
        _told.add(kind)
        warn_user(
            f"{path()} is a {kind.__name__}, which holds tensors but is no container that mgpu_core knows: nothing of "
            f"it was split, and every rank gets it whole. mgpu_core.register_container({kind.__name__}, flatten, "
            "unflatten) makes it one; mgpu_core.Replicate(...) says that every rank should get it whole."
        )
    elif rows >= _FEWEST and kind not in _told and _reaches(leaf, rows, _DEPTH) and path() not in _told_paths:
        _told_paths.add(path())
        warn_user(
            f"{path()} is a {kind.__name__} with {rows} entries, as many as there are rows, or holds such a thing: it "
            "was not split, and every rank gets all of it. mgpu_core.Rows(...) gives each rank the entries of its "
            "rows; mgpu_core.Replicate(...) says that every rank should get it whole."
        )


def _reaches(obj: Any, rows: int, depth: int) -> bool:
    """Return whether the object is a list, an array or a tensor with so many entries, or holds one."""
    shape = getattr(obj, "shape", None)
    if isinstance(shape, tuple) or isinstance(obj, list | tuple):
        return (shape[0] if shape else 0 if shape is not None else len(obj)) == rows
    return depth > 0 and any(_reaches(each, rows, depth - 1) for each in _inside(obj))


def _inside(obj: Any) -> Iterator[Any]:
    """Yield what an object holds: entries, attributes, the variables of a closure, the arguments of a partial."""
    if isinstance(obj, _NO_CONTAINERS) or obj is None:
        return
    if isinstance(obj, dict):
        yield from obj.values()
    elif isinstance(obj, FunctionType):
        for cell in obj.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is empty yet
                continue
    elif isinstance(obj, partial):
        yield from (obj.func, *obj.args, *obj.keywords.values())
    elif isinstance(obj, MethodType):
        yield obj.__self__
    else:
        yield from getattr(obj, "__dict__", {}).values()


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
