"""What an attribute of a module holds: what may change inside it, and what a copy for another rank needs."""

from __future__ import annotations

from collections import deque
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch.nn import Module, Parameter

from mgpu_core.look import Look

__all__ = ["PLAIN", "Inside", "copies_its_own_way", "own_attributes"]

PLAIN = (bool, int, float, complex, str, bytes, NoneType)
_MOST = 1000  # entries that are looked into; what has more of them is looked at as one thing
_TORCHS = frozenset(vars(Module())) | {"_compiled_call_impl"}  # what any module is made of
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, partial)
_WORDS = (torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, PurePath, range, slice)
_WAYS = ("__reduce_ex__", "__reduce__", "__getstate__", "__deepcopy__")


class Inside:
    """Of one value.

    Lists, dicts and objects of plain classes are looked into.  What says itself how it is copied is one thing, as
    modules, parameters and code are; and so is an object that leads to such a thing: a configuration is data, a trainer
    is not.

    Attributes:
        containers: lists and dicts.
        tensors: but for parameters.
        is_data: nothing but what a rank may have a copy of.
    """

    def __init__(self, value: Any) -> None:
        self.containers: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self._has_objects = self._has_more = False
        is_small = self._walk(value)
        self.is_data = not self._has_objects or (is_small and not self._has_more)
        if not (is_small and self.is_data):
            self.containers.clear()
            self.tensors.clear()

    def _walk(self, value: Any) -> bool:
        found, seen = [value], {id(value)}
        for each in found:
            entries = self._entries(each)
            if len(found) + len(entries) > _MOST:
                return False
            new = [entry for entry in entries if type(entry) not in PLAIN and id(entry) not in seen]
            seen.update(map(id, new))
            found += new
        return True

    def look(self) -> Look | None:
        """At all of it; ``None`` where there is nothing to look at."""
        versions = [(each, "_version") for each in self.tensors if not each.is_inference()]
        return Look(self.containers, versions) if self.containers or versions else None

    def prepare_copy(self, memo: dict[int, Any], home: torch.device, device: torch.device) -> None:
        """Puts copies of tensors into a memo of ``copy.deepcopy``: of what it refuses, and of what must go elsewhere.

        Args:
            memo: what it has already, stays.
            home: tensors on this device
            device: are copied to this one; those on others stay where they are.
        """
        for each in self.tensors:
            if id(each) not in memo and (each.grad_fn is not None or (each.device == home != device)):
                memo[id(each)] = each.detach().to(device if each.device == home else each.device, copy=True)

    def _entries(self, value: Any) -> list[Any]:
        """As they are now: another thread may add some."""
        if isinstance(value, torch.Tensor):
            if not isinstance(value, Parameter):
                self.tensors.append(value)
        elif isinstance(value, tuple | set | frozenset | deque):
            return list(value)
        elif isinstance(value, list | dict):
            self.containers.append(value)
            return list(value.values() if isinstance(value, dict) else value)
        elif _is_plain_object(value):
            self._has_objects = True
            self.containers.append(vars(value))
            return list(vars(value).values())
        elif not isinstance(value, (*PLAIN, *_CODE, *_WORDS)):
            self._has_more = True
        return []


def own_attributes(module: Module) -> list[tuple[str, Any]]:
    """A module's attributes, but for parameters, buffers, children, hooks and its mode."""
    return [(name, value) for name, value in list(vars(module).items()) if name not in _TORCHS]


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, SimpleNamespace):
        return True
    known = isinstance(value, (*_CODE, *_WORDS, Module)) or type(value).__module__.startswith("torch.")
    return hasattr(value, "__dict__") and not known and not copies_its_own_way(value, object)


def copies_its_own_way(value: Any, base: type) -> bool:
    """Whether its class copies, or pickles, in another way than this base."""
    return any(getattr(type(value), way, None) is not getattr(base, way, None) for way in _WAYS)
