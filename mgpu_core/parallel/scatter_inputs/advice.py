"""What to tell people about their inputs: two that differ in their rows, and things of which nothing is cut.

Those are a class with tensors that is no container this package opens; a list, an array or a function that holds as
many entries as the batch has rows.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.layer_holders import contents_of
from mgpu_core.trees.nested import RankParts, Replicate, Rows

__all__ = ["disagreement", "rows_of", "warn_unknown"]

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


def disagreement(leaves: Sequence[Any], path: Callable[[int], str], pair: tuple[int, int], dim: int) -> str:
    """Return the message about two leaves that differ in their rows.

    Args:
        leaves: of all arguments.
        path: returns the path of a leaf.
        pair: the positions of the two.
        dim: the dimension of the rows.
    """
    described = ", ".join(f"{path(position)} has {_size_of(leaves[position])}" for position in pair)
    few, many = sorted(pair, key=lambda position: rows_of(leaves[position], dim))
    ways = list(_ways(leaves, path, few, many, dim))
    alike = {re.sub(r"\[\d+\]", "[]", path(position)) for position in pair}
    if len(alike) == 1 and alike != {"inputs[]"}:  # of one list, not two arguments
        ways = ["A list with one entry per row goes into mgpu_core.Rows(...)"]
    advice = "; or ".join(ways) or "What every rank should get whole goes into mgpu_core.Replicate(...)"
    return f"the inputs differ in their number of rows along dimension {dim}: {described}. {advice}"


def _ways(leaves: Sequence[Any], path: Callable[[int], str], few: int, many: int, dim: int) -> Iterator[str]:
    """Yield how a tensor of few rows and one of many can be passed, as far as their shapes tell."""
    one, other = leaves[few], leaves[many]
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return
    rows, most = one.size(dim), other.size(dim)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    for axis in range(min(leaf.dim() for leaf in tensors)):
        sizes = {leaf.size(axis) for leaf in tensors}
        if axis != dim and len(sizes) == 1 and sizes != {1}:
            yield (
                f"All have {sizes.pop()} entries along dimension {axis}: if those are the rows, pass dim={axis} "
                f"to the wrapper or the step, or --dim {axis} to `mgpu run`"
            )
            break
    for axis, size in enumerate(one.shape):
        if axis != dim and size == most > 1:
            name = path(few)
            yield (
                f"{name} has {most} entries along dimension {axis}: if those are its rows, pass "
                f"{name}.transpose({dim}, {axis})"
            )
            return
    if 1 < rows < most and most % rows == 0:
        folded = f"{path(many)}.unflatten({dim}, ({rows}, {most // rows}))"
        yield (
            f"{path(many)} has {most // rows} rows for each of {path(few)}: pass {folded}, and flatten "
            "it in the forward"
        )
    elif other.dim() == 1 and any(leaf.shape == (rows,) for leaf in tensors):
        yield "Flat data with a length per row goes into mgpu_core.Rows(x.split(lengths))"


def rows_of(leaf: torch.Tensor | Rows[Any] | RankParts, dim: int) -> int:
    """Return how many rows a leaf has along ``dim``."""
    if isinstance(leaf, RankParts):
        return sum(leaf.counts)
    return len(leaf) if isinstance(leaf, Rows) else leaf.size(dim)


def _size_of(leaf: torch.Tensor | Rows[Any] | RankParts) -> str:
    return f"shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"{rows_of(leaf, 0)} rows"


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
