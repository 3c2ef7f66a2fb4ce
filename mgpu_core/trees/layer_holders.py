"""Containers and bound methods in attributes that reach layers of a module: a replica's must reach the replica's.

``self.blocks = [self.first, self.second]`` registers nothing, so that copies of the registered modules leave the list
as it is, with the original's layers.  Here such attributes are found, in every forward and so by loops that run in C,
and made again for a replica.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from operator import call, itemgetter
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

import torch
from torch.nn import Module

__all__ = ["attributes_that_reach", "contents_of", "entries_of", "leads_to", "rewired", "slots_of", "still_reached"]

_DEPTH = 100  # of containers in containers
_TORCHS = {*vars(Module()), "_compiled_call_impl", "_former_parameters", "_is_replica", "_flat_weights", "_all_weights"}
_KEPT = 4096

_DICTS, _LISTS = (dict, OrderedDict, defaultdict), (list, tuple)


class _Getters(dict[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]):
    """By the names of a module's attributes a function that takes the user's own from its ``__dict__``."""

    def __missing__(self, names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
        if len(self) >= _KEPT:
            self.clear()
        others = [name for name in names if name not in _TORCHS]
        filler = "training" if "training" in names else names[0]
        getter = self[names] = itemgetter(*others, filler, filler)
        return getter


_getters = _Getters()
_plain: set[type] = set()  # classes whose objects reach nothing
_reaching: set[type] = set()  # and those whose objects may


def entries_of(value: Any) -> list[Any]:
    """Return what a container, a partial or a bound method reaches; nothing for anything else."""
    kind = type(value)
    if kind in _DICTS:
        return [*value, *value.values()]
    if kind in _LISTS or _is_named_tuple(kind):
        return list(value)
    if kind is partial:
        return [value.func, value.args, value.keywords]
    return [value.__self__] if kind is MethodType else []


def contents_of(obj: Any) -> list[Any]:
    """Return all that an object holds: entries, attributes, slots, variables of closures, defaults, a weak referent."""
    if isinstance(obj, dict):
        return list(obj.values())
    if isinstance(obj, list | tuple | set | frozenset | deque):
        return list(obj)
    if isinstance(obj, FunctionType):
        cells = [cell for cell in obj.__closure__ or () if cell != _EMPTY]
        return [
            *(cell.cell_contents for cell in cells),
            *(obj.__defaults__ or ()),
            *(obj.__kwdefaults__ or {}).values(),
        ]
    if isinstance(obj, ReferenceType):
        return [obj()]
    if type(obj) in (partial, MethodType):
        return entries_of(obj)
    slots = slots_of(type(obj))  # type: ignore[arg-type]  # mypy takes no class for hashable
    return [*getattr(obj, "__dict__", {}).values(), *(getattr(obj, name, None) for name in slots)]


_EMPTY = CellType()


@lru_cache(_KEPT)
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the slots that objects of a class keep values in."""
    slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = chain.from_iterable((each,) if isinstance(each, str) else each for each in slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def still_reached(copied: Module, originals: Collection[int]) -> str | None:
    """Return the path of an attribute of a copied module that reaches a module it was copied of; ``None``: none does.

    By a closure, a weak reference, or an object with such: those are shared, where containers and objects are copied.

    Args:
        copied: a deep copy.
        originals: the ids of the original's modules.
    """
    for path, module in copied.named_modules():
        for name, value in vars(module).items():
            if (name not in _TORCHS or name.endswith("_hooks")) and leads_to(value, originals):
                return f"{path}.{name}" if path else name
    return None


def leads_to(value: Any, wanted: Collection[int]) -> bool:
    """Return whether an object is, or leads in any way to, one with a wanted id."""
    waiting, seen = [value], {id(value)}
    for obj in waiting:  # it grows meanwhile
        if id(obj) in wanted:
            return True
        if len(waiting) < _KEPT and not isinstance(obj, Module | torch.Tensor | type):
            inside = [one for one in contents_of(obj) if id(one) not in seen]
            seen.update(map(id, inside))
            waiting += inside
    return False


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _may_reach(kind: type) -> bool:
    return issubclass(kind, Module) or kind in (*_DICTS, *_LISTS, partial, MethodType) or _is_named_tuple(kind)


def attributes_that_reach(modules: Sequence[Module], wanted: Collection[int]) -> list[list[str]] | None:
    """Return per module the names of attributes that reach a wanted module; ``None`` if there are none at all.

    Args:
        modules: whose attributes are looked at, without their registered parameters, buffers and modules.
        wanted: ids of modules.
    """
    tables = list(map(vars, modules))
    getters = [_getters[names] for names in map(tuple, tables)]
    if not _reaches(list(chain(*map(call, getters, tables))), wanted):
        return None
    return [
        [name for name, value in table.items() if name not in _TORCHS and _reaches([value], wanted)] for table in tables
    ]


def _reaches(values: Iterable[Any], wanted: Collection[int]) -> bool:
    """Return whether one of the values is a wanted module, or reaches one."""
    sources: list[Iterable[Any]] = [values]
    seen: set[int] = set()
    for _ in range(_DEPTH):
        kinds = set(map(type, chain.from_iterable(sources))) - _plain
        if not kinds:
            return False
        if not kinds <= _reaching and not (kinds := _sorted_out(kinds)):
            return False
        candidates = [value for value in chain.from_iterable(sources) if type(value) in kinds]
        ids = set(map(id, candidates))
        if not ids.isdisjoint(wanted):
            return True
        if not seen.isdisjoint(ids):
            candidates = [value for value in candidates if id(value) not in seen]
        seen |= ids
        sources = [value for value in candidates if type(value) in _LISTS]
        sources += list(map(entries_of, [value for value in candidates if type(value) not in _LISTS]))
    return False


def _sorted_out(kinds: set[type]) -> set[type]:
    """Return the classes whose objects may reach modules; remember all."""
    if len(_plain) + len(_reaching) > _KEPT:
        _plain.clear()
        _reaching.clear()
    reaching = set(filter(_may_reach, kinds))
    _reaching.update(reaching)
    _plain.update(kinds - reaching)
    return reaching


def rewired(value: Any, replacements: dict[int, Any], depth: int = _DEPTH) -> Any:
    """Return the value with other modules in place of some; the value itself where it reaches none of those.

    Args:
        value: a container, a partial, a bound method, or a module.
        replacements: of some objects, by their ids; containers are added, so that identity and cycles stay.
        depth: how many containers deep.
    """
    if id(value) in replacements:
        return replacements[id(value)]
    kind = type(value)
    if not depth or kind in _plain or isinstance(value, Module):
        return value
    again = partial(_rewired_all, replacements=replacements, depth=depth - 1)
    if kind in _DICTS:
        return _filled(value, value.copy(), replacements, again)
    if kind is list:
        return _filled(value, value.copy(), replacements, again)
    new = value
    if kind is tuple or _is_named_tuple(kind):
        entries, same = again(value)
        new = value if same else tuple(entries) if kind is tuple else kind._make(entries)
    elif kind is partial:
        (function, arguments, keywords), same = again((value.func, value.args, value.keywords))
        new = value if same else partial(function, *arguments, **keywords)
    elif kind is MethodType:
        (owner,), same = again((value.__self__,))
        new = value if same else MethodType(value.__func__, owner)
    replacements[id(value)] = new
    return new


def _rewired_all(values: Iterable[Any], replacements: dict[int, Any], depth: int) -> tuple[list[Any], bool]:
    before = list(values)
    after = [rewired(each, replacements, depth) for each in before]
    return after, all(one is other for one, other in zip(before, after, strict=True))


def _filled(
    value: Any, new: Any, replacements: dict[int, Any], again: Callable[[Iterable[Any]], tuple[list[Any], bool]]
) -> Any:
    """Return the copy of a list or dict with its entries made again; it is known before they are, for cycles."""
    replacements[id(value)] = new
    if isinstance(value, Mapping):
        keys, same_keys = again(value)
        values, same_values = again(value.values())
        same = same_keys and same_values
        if not same:
            new.clear()
            new.update(zip(keys, values, strict=True))
    else:
        new[:], same = again(value)
    if same:
        replacements[id(value)] = value
    return replacements[id(value)]
