"""Hooks that a forward registers belong to its replica, and those that are there mean the replica's modules.

A replica has tables of hooks of its own.  Seven per module, rank and forward would cost a quarter of all that replicate
does (measured), and most modules have no hooks: their replicas share one empty table until torch's methods for
registering are called on them.  These are wrapped once, in the first forward over several ranks, and do for all other
modules what they always did.

A hook that is bound to a module (``self.layer.register_forward_hook(self.keep)``), or has one in a variable of its
closure, gets the replica's in its place.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from types import CellType, FunctionType, MethodType
from typing import Any, NoReturn

from torch.nn import Module

from mgpu_core.trees.layer_holders import leads_to, rewired

__all__ = [
    "DICTIONARIES",
    "NO_HOOKS",
    "SHARES_HOOKS",
    "WeakMethod",
    "have_hooks",
    "hook_that_reaches",
    "keep_hooks_apart",
    "own_hooks",
    "rewire_hooks",
    "users_hooks",
    "weakened",
]

SHARES_HOOKS = "_shares_hooks"
"""The mark of a replica whose tables are the empty one."""

DICTIONARIES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_METHODS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)


class _Empty(OrderedDict[int, Any]):
    """The table of all replicas without hooks."""

    def __setitem__(self, key: int, hook: Any) -> NoReturn:
        raise RuntimeError("a replica gets hooks by register_forward_hook() and its like, and not by its tables")


NO_HOOKS: dict[str, Any] = {**dict.fromkeys(DICTIONARIES, _Empty()), SHARES_HOOKS: True}
"""The attributes of a replica without hooks."""


def have_hooks(attributes: dict[str, Any]) -> bool:
    """Return whether a module with these attributes has hooks."""
    return any(attributes.get(name) for name in DICTIONARIES)


def users_hooks(module: Module) -> list[Any]:
    """Return the hooks of a module that are not this package's."""
    hooks = [hook for name in DICTIONARIES for hook in (vars(module).get(name) or {}).values()]
    return [each for each in hooks if not isinstance(each, bool) and not str(each.__module__).startswith("mgpu_core.")]


def own_hooks(attributes: dict[str, Any], replicas: Mapping[int, Any]) -> dict[str, Any]:
    """Return tables of hooks for the replica of a module with hooks.

    Args:
        attributes: of the module.
        replicas: the replica of each module, by the id of the module; of a container that replicas have copies of, too.
    """
    return {
        name: OrderedDict((key, _rewired(hook, replicas)) for key, hook in attributes[name].items())
        for name in DICTIONARIES
        if name in attributes
    }


def rewire_hooks(copied: Module, copies: Mapping[int, Any]) -> None:
    """Let hooks of a copied module mean the copies, by the ids of the originals, also in variables of closures."""
    for module in copied.modules():
        if have_hooks(vars(module)):
            vars(module).update(own_hooks(vars(module), copies))


def _rewired(hook: Any, replacements: Mapping[int, Any]) -> Any:
    if type(hook) is not FunctionType or not hook.__closure__:
        return rewired(hook, dict(replacements))
    return _with_cells(hook, lambda value: replacements.get(id(value), value))


def hook_that_reaches(replica: Module, originals: Collection[int]) -> str | None:
    """Return the name of a layer with a hook that still reaches a module of which the replica is; ``None``: none does.

    By an object of its own, or a container in its closure: such are shared by all ranks.
    """
    for path, module in replica.named_modules():
        if any(leads_to(hook, originals) for hook in users_hooks(module)):
            return path or "the module"
    return None


def weakened(hook: Any) -> Any:
    """Return a hook that holds replicas weakly: theirs is the table that holds it."""
    if type(hook) is MethodType and isinstance(hook.__self__, Module):
        return WeakMethod(hook)
    if type(hook) is not FunctionType or not hook.__closure__:
        return hook
    return _with_cells(hook, lambda value: weakref.proxy(value) if "_is_replica" in _vars(value) else value)


def _vars(value: Any) -> dict[str, Any]:
    return value.__dict__ if isinstance(value, Module) and not isinstance(value, weakref.ProxyTypes) else {}


def _with_cells(function: FunctionType, other: Callable[[Any], Any]) -> FunctionType:
    """Return the function with other values in some variables of its closure; itself if all stay."""
    before = function.__closure__ or ()
    cells = [cell if cell == _EMPTY_CELL else _other_cell(cell, other) for cell in before]
    if all(one is two for one, two in zip(cells, before, strict=True)):
        return function
    new = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    return new


def _other_cell(cell: CellType, other: Callable[[Any], Any]) -> CellType:
    value = other(cell.cell_contents)
    return cell if value is cell.cell_contents else CellType(value)


_EMPTY_CELL = CellType()


class WeakMethod:
    """A bound method that does not keep its module alive."""

    __slots__ = ("_method",)

    def __init__(self, method: MethodType) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        if method is None:
            raise ReferenceError("the replica of this method is gone")
        return method(*args, **kwargs)


def _own(module: Module) -> None:
    if module.__dict__.pop(SHARES_HOOKS, False):
        for name in DICTIONARIES:
            module.__dict__[name] = OrderedDict()


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def register(self: Module, *args: Any, **kwargs: Any) -> Any:
        _own(self)
        return method(self, *args, **kwargs)

    register.mgpu_core_wraps = True  # type: ignore[attr-defined]
    return register


are_apart = False
"""Whether torch's methods are wrapped."""


def keep_hooks_apart() -> None:
    """Wrap torch's methods."""
    global are_apart
    for name in _METHODS:
        if not hasattr(getattr(Module, name), "mgpu_core_wraps"):
            setattr(Module, name, _wrapped(getattr(Module, name)))
    are_apart = True
