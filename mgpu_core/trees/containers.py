"""Containers: which objects are opened, and how one like them is made again with other entries.

Classes that were registered, named tuples, mappings, dataclasses, lists and tuples, in this order.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["Opened", "is_registered", "opened", "register_container"]

Opened: TypeAlias = tuple[Iterable[str], Iterable[Any], Callable[[list[Any]], Any]]


Flatten: TypeAlias = Callable[[Any], tuple[Sequence[Any], Any]]
Unflatten: TypeAlias = Callable[[list[Any], Any], Any]

_registered: dict[type, tuple[Flatten, Unflatten]] = {}


def register_container(cls: type, flatten: Flatten, unflatten: Unflatten) -> None:
    """Let objects of this very class be opened, so that their tensors are cut for the ranks and joined again.

    Args:
        cls: the class; its subclasses are registered by themselves.
        flatten: takes an object and returns its values, and whatever else ``unflatten`` needs.
        unflatten: takes as many values and the rest, and returns such an object.

    Raises:
        TypeError: ``cls`` is no class, or a function cannot be called.
    """
    if not isinstance(cls, type):
        raise TypeError(f"cls must be a class, not {cls!r}")
    for name, function in (("flatten", flatten), ("unflatten", unflatten)):
        if not callable(function):
            raise TypeError(f"{name} must be a function, not {function!r}")
    _registered[cls] = flatten, unflatten


def is_registered(cls: type) -> bool:
    """Return whether the class was given to :func:`register_container`."""
    return cls in _registered


def _open_registered(obj: Any, functions: tuple[Flatten, Unflatten]) -> Opened:
    flatten, unflatten = functions
    values, rest = flatten(obj)
    return [f"[{i}]" for i in range(len(values))], values, lambda entries: unflatten(entries, rest)


def opened(obj: Any) -> Opened | None:
    """Return the names of a container's entries, their values, and a function that makes one like it of other values.

    ``None``: it is no container.
    """
    functions = _registered.get(type(obj))
    if functions is not None:
        return _open_registered(obj, functions)
    if isinstance(obj, tuple) and hasattr(obj, "_fields") and hasattr(obj, "_asdict"):
        return [f".{name}" for name in obj._fields], obj, obj._make  # type: ignore[attr-defined]
    if isinstance(obj, Mapping):
        keys = list(obj.keys())  # a TensorDict's own iterator goes over its rows
        return [f"[{key!r}]" for key in keys], obj.values(), _mapping_builder(obj, keys)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return _open_dataclass(obj)
    if isinstance(obj, list | tuple):
        return [f"[{i}]" for i in range(len(obj))], obj, _sequence_builder(obj)
    return None


def _mapping_builder(obj: Mapping[Any, Any], keys: list[Any]) -> Callable[[list[Any]], Any]:
    kind = type(obj)
    if isinstance(obj, defaultdict):
        return lambda values: kind(obj.default_factory, zip(keys, values, strict=True))  # type: ignore[call-arg]
    if kind in (dict, OrderedDict):
        return lambda values: kind(zip(keys, values, strict=True))  # type: ignore[call-arg]

    return lambda values: _made_again(obj, dict(zip(keys, values, strict=True)))


def _open_dataclass(obj: Any) -> Opened:
    names = [each.name for each in dataclasses.fields(obj) if hasattr(obj, each.name)]

    def build(values: list[Any]) -> Any:
        copied = copy.copy(obj)  # not the constructor: it may compute, and fields may be init=False
        for name, value in zip(names, values, strict=True):
            object.__setattr__(copied, name, value)  # frozen ones too
        return copied

    return [f".{name}" for name in names], [getattr(obj, name) for name in names], build


def _sequence_builder(obj: list[Any] | tuple[Any, ...]) -> Callable[[list[Any]], Any]:
    kind = type(obj)
    if kind is list:
        return lambda values: values
    if kind is tuple:
        return tuple

    return lambda values: _made_again(obj, tuple(values) if isinstance(obj, tuple) else values)


def _made_again(obj: Any, plain: Any) -> Any:
    """Return a container of the class of ``obj`` with the entries of ``plain`` and the attributes of ``obj``.

    Uses its constructor, if that accepts ``plain``; otherwise a dict or a list is copied and
    its entries are replaced; otherwise ``plain`` itself, as torch does for all.  Attributes come along, but no tensors:
    those would be of all rows.
    """
    for make in (_constructed, _copied) if isinstance(obj, dict | list) else (_constructed, _constructed_of_dict):
        try:
            container = make(obj, plain)
            if _has_entries(container, plain):
                return container
        except Exception:  # whatever a constructor of somebody else's says to this
            continue
    return plain


def _has_entries(container: Any, plain: Any) -> bool:
    """Return whether it has them, and in the same order; a constructor may take all of them for its first field."""
    if isinstance(plain, dict):
        return list(container.keys()) == list(plain) and all(map(_is_entry, container.values(), plain.values()))
    return len(container) == len(plain) and all(map(_is_entry, container, plain))


def _is_entry(entry: Any, given: Any) -> bool:
    """Return True if ``entry`` is ``given``, or ``given`` converted into a kind of its own, as some dicts do."""
    return entry is given or (not isinstance(given, torch.Tensor) and isinstance(entry, type(given)))


def _plain_attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    """Return the attributes that are numbers, texts, booleans or None, which a copy may have without sharing."""
    for name, value in getattr(obj, "__dict__", {}).items():
        if type(value) in (bool, int, float, str, type(None)):
            yield name, value


def _constructed(obj: Any, plain: Any) -> Any:
    pairs = isinstance(obj, dict) and not isinstance(obj, Counter)  # which would count them
    container = type(obj)(plain.items() if pairs else plain)
    for name, value in _plain_attributes(obj):
        vars(container).setdefault(name, value)  # what the constructor has set, it knows better
    return container


def _constructed_of_dict(obj: Any, plain: Any) -> Any:
    """Return a mapping of the class of ``obj``, constructed from a dict."""
    return type(obj)(plain)


def _copied(obj: Any, plain: Any) -> Any:
    copied = copy.copy(obj)
    if isinstance(plain, dict):
        for key, value in plain.items():
            copied[key] = value
    else:
        copied[:] = plain
    new = plain if isinstance(plain, dict) else {}
    attributes = getattr(copied, "__dict__", {})
    for name, value in list(attributes.items()):
        if name in new and value is obj[name]:  # an entry, too
            attributes[name] = new[name]
        elif isinstance(value, torch.Tensor) and value is not new.get(name):
            del attributes[name]
    return copied
