"""What an attribute of a module holds: what may change inside it, and what a copy for another rank needs."""

from __future__ import annotations

from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch.nn import Module, Parameter

from mgpu_core.look import Look

__all__ = ["PLAIN", "Inside", "own_attributes", "prepare_copy"]

PLAIN = (bool, int, float, complex, str, bytes, NoneType)
_MOST = 1000  # entries that are looked into; what has more of them is looked at as one thing
_TORCHS = frozenset(vars(Module())) | {"_compiled_call_impl"}  # what any module is made of
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class Inside:
    """Of one value.

    Lists, dicts and objects of plain classes are looked into.  What says itself how it is copied is one thing, as
    modules, parameters and code are.

    Attributes:
        containers: lists and dicts.
        tensors: but for parameters.
    """

    def __init__(self, value: Any) -> None:
        self.containers: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        found, seen = [value], {id(value)}
        for each in found:
            entries = self._entries(each)
            if len(found) + len(entries) > _MOST:
                self.containers.clear()
                self.tensors.clear()
                return
            new = [entry for entry in entries if type(entry) not in PLAIN and id(entry) not in seen]
            seen.update(map(id, new))
            found += new

    def look(self) -> Look | None:
        """At all of it; ``None`` where there is nothing to look at."""
        versions = [(each, "_version") for each in self.tensors if not each.is_inference()]
        return Look(self.containers, versions) if self.containers or versions else None

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
            self.containers.append(vars(value))
            return list(vars(value).values())
        return []


def own_attributes(module: Module) -> list[tuple[str, Any]]:
    """A module's attributes, but for parameters, buffers, children, hooks and its mode."""
    return [(name, value) for name, value in list(vars(module).items()) if name not in _TORCHS]


def prepare_copy(value: Any, memo: dict[int, Any], home: torch.device, device: torch.device) -> None:
    """Puts copies of tensors into a memo of ``copy.deepcopy``: of what it refuses, and of what must go elsewhere.

    Args:
        value: what is going to be copied.
        memo: what it has already, stays.
        home: tensors on this device
        device: are copied to this one; those on others stay where they are.
    """
    for each in Inside(value).tensors:
        if id(each) not in memo and (each.grad_fn is not None or (each.device == home != device)):
            memo[id(each)] = each.detach().to(device if each.device == home else each.device, copy=True)


def _is_plain_object(value: Any) -> bool:
    kind: Any = type(value)
    if isinstance(value, SimpleNamespace):
        return True
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (*_CODE, Module))
        and (kind.__reduce_ex__, kind.__reduce__) == (object.__reduce_ex__, object.__reduce__)
        and not hasattr(kind, "__deepcopy__")
        and not kind.__module__.startswith("torch.")
    )
