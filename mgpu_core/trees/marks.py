"""Marks of the contents of objects, beside modules and tensors, to see whether a call has changed them.

A counter in a helper object, a list that grows, a dict that hooks fill: ranks share them, and each changes them once,
where one device changes them once a call.  A mark is a value that compares equal as long as nothing has changed, as far
as it looks: some levels deep, and not at all entries of large containers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import Module

__all__ = ["changed", "held_by", "marks_of"]

_DEPTH = 4  # of objects in objects
_ENTRIES = 32  # of a container that are looked at, from its end
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (type, ModuleType, BuiltinFunctionType)
_OF_MODULES = set(vars(Module()))


def held_by(obj: Any) -> dict[str, Any]:
    """Return the objects of a function or a callable object by name: variables, defaults, attributes and buffers.

    Of the globals that a function names, those that are neither code nor modules of Python.
    """
    if isinstance(obj, partial):
        named = {f"argument {index}": each for index, each in enumerate(obj.args)}
        return {**held_by(obj.func), **named, **obj.keywords}
    if isinstance(obj, MethodType):
        return held_by(obj.__self__)
    if isinstance(obj, FunctionType):
        return _variables_of(obj)
    if isinstance(obj, Module):
        return {**_own_attributes(obj), **dict(obj.named_buffers())}
    return dict(getattr(obj, "__dict__", {}))


def _variables_of(function: FunctionType) -> dict[str, Any]:
    code, variables = function.__code__, {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # it is empty
            continue
    for name in code.co_names:
        value = function.__globals__.get(name)
        if value is not None and not isinstance(value, (*_CODE, FunctionType)):
            variables[name] = value
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    variables |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    return variables | (function.__kwdefaults__ or {}) | function.__dict__


def _own_attributes(module: Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def marks_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mark of each object, by its name."""
    known: dict[int, Any] = {}
    return {name: _mark(value, _DEPTH, known) for name, value in named.items()}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names whose marks differ."""
    return [name for name, mark in after.items() if before.get(name) != mark]


class _Itself:
    """Equal to the mark of the same object alone; it is kept, so that no other one gets its id."""

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value


def _mark(value: Any, depth: int, known: dict[int, Any]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    itself = _Itself(value)
    if isinstance(value, torch.Tensor):
        return itself, None if value.is_inference() else value._version
    if not depth or isinstance(value, _CODE):
        return itself
    if id(value) not in known:
        known[id(value)] = itself  # while it is marked: an object may hold itself
        known[id(value)] = itself, *_marks_inside(value, depth - 1, known)
    return known[id(value)]


def _marks_inside(value: Any, depth: int, known: dict[int, Any]) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        entries = list(value.items())
        last = [(_mark(key, 0, known), _mark(each, depth, known)) for key, each in entries[-_ENTRIES:]]
        return len(entries), last
    if isinstance(value, list | tuple | deque):
        return len(value), [_mark(each, depth, known) for each in list(value)[-_ENTRIES:]]
    if isinstance(value, set | frozenset):
        return (len(value),)
    if isinstance(value, partial | MethodType):
        parts = [value.func, *value.args, *value.keywords.values()] if isinstance(value, partial) else [value.__self__]
        return tuple(_mark(each, depth, known) for each in parts)
    if isinstance(value, Module):  # one that a function names; of layers in containers each rank has its own
        held = _own_attributes(value) if depth == _DEPTH - 1 else {}
        return tuple((name, _mark(each, 1, known)) for name, each in held.items())
    return tuple((name, _mark(each, depth, known)) for name, each in held_by(value).items())
