"""Lists, dicts and dataclasses that code fills: they stay the same objects, and entries are exchanged in place."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core.trees.containers import is_registered, opened

__all__ = ["FilledContents", "FilledCopies", "Undo", "exchanged_back", "holds_tensor", "is_fillable", "map_in_place"]

Undo = list[tuple[Any, Any, Any, Any]]
"""A tuple for each entry that was exchanged: the container, the key, the value before, and the value since."""

_DEPTH = 8  # of nests in which containers and tensors are looked for
_SIMPLE = (bool, int, float, str, type(None))


def _tuple_like(obj: tuple[Any, ...], entries: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same kind with these entries; the same one where none is another."""
    if all(map(operator.is_, entries, obj)) or not (type(obj) is tuple or hasattr(obj, "_fields")):
        return obj
    return tuple(entries) if type(obj) is tuple else type(obj)._make(entries)  # type: ignore[attr-defined]


def _attributes_of(obj: Any) -> dict[str, Any] | None:
    """Return the attributes of an object; ``None``: it has none, or others may know it by its identity."""
    is_known = callable(obj) or isinstance(obj, torch.Tensor | ModuleType | Enum)
    is_made = getattr(type(obj), "__new__", None) is object.__new__
    return None if is_known or not is_made else getattr(obj, "__dict__", None)


def is_fillable(obj: Any) -> bool:
    """Return whether an object is a container that can be given other entries."""
    if isinstance(obj, list | dict | UserDict | deque | set):
        return not is_registered(type(obj))
    is_record = dataclasses.is_dataclass(obj) and not isinstance(obj, type) and not is_registered(type(obj))
    return is_record and not type(obj).__dataclass_params__.frozen


def _entries(obj: Any) -> dict[Any, Any]:
    """Return the entries of a container by index, key or name."""
    if isinstance(obj, list | deque):
        return dict(enumerate(obj))
    if isinstance(obj, set):
        return dict.fromkeys(obj)
    if isinstance(obj, dict | UserDict):
        return dict(obj.items())
    return {each.name: getattr(obj, each.name) for each in dataclasses.fields(obj) if hasattr(obj, each.name)}


def _set(obj: Any, key: Any, value: Any) -> None:
    if isinstance(obj, list | deque | dict | UserDict):
        obj[key] = value
    else:
        object.__setattr__(obj, key, value)


def _replace(obj: Any, entries: dict[Any, Any]) -> None:
    """Give a container these entries instead of its own."""
    if isinstance(obj, list | deque | set):
        obj.clear()
        obj.update(entries) if isinstance(obj, set) else obj.extend(entries.values())
        return
    now = _entries(obj)
    for key in now.keys() - entries.keys():
        delattr(obj, key) if dataclasses.is_dataclass(obj) and not isinstance(obj, dict) else obj.pop(key)
    for key, value in entries.items():
        if key not in now or now[key] is not value:
            _set(obj, key, value)


def _are_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return now.keys() == before.keys() and all(now[key] is value for key, value in before.items())


def map_in_place(obj: Any, function: Callable[[Any], Any], undo: Undo) -> Any:
    """Return the nest with ``function(leaf)`` in place of each leaf; containers that can be filled stay the same ones.

    Others, such as tuples, are made again where an entry changes.  ``undo`` gets the entries that were exchanged.
    """
    if isinstance(obj, torch.Tensor):
        return function(obj)
    if isinstance(obj, _SIMPLE):
        return obj
    if not is_fillable(obj) or isinstance(obj, set):
        container = None if isinstance(obj, PackedSequence) else opened(obj)
        if container is None:
            return function(obj)
        _, values, build = container
        values = list(values)
        mapped = [map_in_place(each, function, undo) for each in values]
        return obj if all(map(operator.is_, mapped, values)) else build(mapped)
    for key, value in _entries(obj).items():
        new = map_in_place(value, function, undo)
        if new is not value:
            _set(obj, key, new)
            undo.append((obj, key, value, new))
    return obj


def exchanged_back(undo: Undo) -> None:
    """Give containers the entries of before :func:`map_in_place`, but for those that were changed since."""
    for container, key, before, since in reversed(undo):
        if _entries(container).get(key) is since:
            _set(container, key, before)


def _fillable_below(obj: Any, seen: dict[int, Any], *, of_objects: bool = False, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the containers below an object that can be filled, each once, those inside others after them.

    Args:
        obj: the object.
        seen: gets all that was looked at, by its id.
        of_objects: objects are dicts of their attributes.
        depth: of nests that are looked at.
    """
    is_filled = is_fillable(obj)
    is_opened = of_objects and not is_filled and not isinstance(obj, torch.Tensor | torch.nn.Module | type)
    if is_opened and (attributes := getattr(obj, "__dict__", None)) is not None:
        obj, is_filled = attributes, True
    if not depth or id(obj) in seen or not (is_filled or isinstance(obj, tuple | torch.Tensor)):
        return
    seen[id(obj)] = obj
    if is_filled:
        yield obj
    for entry in () if isinstance(obj, torch.Tensor) else _entries(obj).values() if is_filled else obj:
        yield from _fillable_below(entry, seen, of_objects=of_objects, depth=depth - 1)


class FilledContents:
    """The entries of all containers below an object, to be compared and put back.

    Args:
        obj: the object.
        of_objects: also the attributes of objects.
        values: also the values of tensors.

    Attributes:
        held_tensor: there was a tensor in them.
    """

    def __init__(self, obj: Any, *, of_objects: bool = False, values: bool = False) -> None:
        seen: dict[int, Any] = {}
        depth = 2 * _DEPTH if of_objects else _DEPTH
        self._kept = [(each, _entries(each)) for each in _fillable_below(obj, seen, of_objects=of_objects, depth=depth)]
        tensors = [each for each in seen.values() if isinstance(each, torch.Tensor)] if values else []
        self._values = [(each, each.detach().clone()) for each in tensors]
        self.held_tensor = any(isinstance(each, torch.Tensor) for each in seen.values())

    @property
    def ids(self) -> set[int]:
        """The ids of the containers."""
        return {id(each) for each, _ in self._kept}

    @property
    def have_changed(self) -> bool:
        """Return whether some container has other entries now."""
        return any(not _are_same(_entries(each), before) for each, before in self._kept)

    def put_back(self) -> None:
        """Give all containers their entries of before, and tensors their values."""
        for container, before in self._kept:
            _replace(container, before)
        with torch.no_grad():
            for tensor, values in self._values:
                tensor.copy_(values)


class FilledCopies:
    """Copies of containers, so that one of several tasks fills its own; :meth:`merge` fills the originals.

    Args:
        of_objects: also of objects with attributes; then nothing is merged.
    """

    def __init__(self, *, of_objects: bool = False) -> None:
        self._of_objects = of_objects
        self._made: dict[int, tuple[Any, Any, dict[Any, Any]]] = {}  # by the id of the original: it, copy, its entries

    def copied(self, obj: Any, depth: int = _DEPTH, *, inside: bool = False) -> Any:
        """Return the nest with a copy of each container that can be filled.

        Objects without attributes are copied ``inside`` others alone, which may fill them; elsewhere they may stand for
        something by their identity.
        """
        if isinstance(obj, tuple):
            return _tuple_like(obj, [self.copied(each, depth - 1, inside=inside) for each in obj]) if depth else obj
        is_filled = is_fillable(obj)
        table = obj if is_filled else _attributes_of(obj) if self._of_objects else None
        if not depth or table is None or not (table or is_filled or inside):
            return obj
        inside |= not is_filled
        if id(obj) not in self._made:
            clone = copy.copy(obj) if is_filled else object.__new__(type(obj))
            self._made[id(obj)] = obj, clone, {}
            entries = {key: self.copied(value, depth - 1, inside=inside) for key, value in _entries(table).items()}
            _replace(clone if is_filled else vars(clone), entries)
            self._made[id(obj)] = obj, clone, entries
        return self._made[id(obj)][1]

    @property
    def of_originals(self) -> dict[int, Any]:
        """The copies, by the ids of the originals."""
        return {key: own for key, (_, own, _) in self._made.items()}

    def merge(self) -> None:
        """Add, exchange and take away entries of the originals as it was done to the copies."""
        originals = {id(own): obj for obj, own, _ in self._made.values()}
        for obj, clone, before in self._made.values():
            now = _entries(clone)
            if _are_same(now, before):
                continue
            now = {key: originals.get(id(value), value) for key, value in now.items()}
            is_longer = isinstance(clone, list | deque) and all(_entries(clone).get(k) is v for k, v in before.items())
            if is_longer:
                obj.extend(list(now.values())[len(before) :])
            elif isinstance(clone, list | deque):
                _replace(obj, now)
            else:
                changed = {k: v for k, v in now.items() if k not in before or _entries(clone)[k] is not before[k]}
                kept = {k: v for k, v in _entries(obj).items() if k in now or k not in before}
                _replace(obj, kept | changed)


def holds_tensor(obj: Any, *, of_graph: bool = False) -> bool:
    """Return whether an object is a tensor, or holds one (``of_graph``: with a graph) in a container or attribute."""
    seen: dict[int, Any] = {}
    for _ in _fillable_below(obj, seen, of_objects=True):
        pass
    return any(isinstance(each, torch.Tensor) and (each.grad_fn or not of_graph) for each in seen.values())
