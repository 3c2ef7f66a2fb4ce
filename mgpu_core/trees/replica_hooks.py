"""Hooks that a forward registers belong to its replica.

A replica shares its original's dictionaries of hooks: copies of seven per module, rank and forward would cost a quarter
of all that replicate does (measured).  That is right while no hook is registered on a replica.  A forward that
does, mostly to take an activation and remove the hook again, would register it on the original and on all other ranks,
and get their activations.  So a replica gets dictionaries of its own at the last moment: when torch's methods for
registering are called on it.  They are wrapped once, in the first forward over several ranks, and do for all other
modules what they always did.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.nn import Module

__all__ = ["DICTIONARIES", "SHARES_HOOKS", "keep_hooks_apart"]

SHARES_HOOKS = "_shares_hooks"
"""The mark of a replica whose dictionaries are still the original's."""

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


def _own(module: Module) -> None:
    if module.__dict__.pop(SHARES_HOOKS, False):
        for name in DICTIONARIES:
            module.__dict__[name] = module.__dict__[name].copy()


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def register(self: Module, *args: Any, **kwargs: Any) -> Any:
        _own(self)
        return method(self, *args, **kwargs)

    register.mgpu_core_wraps = True  # type: ignore[attr-defined]
    return register


def keep_hooks_apart() -> None:
    """Wrap torch's methods, unless that has been done."""
    if hasattr(getattr(Module, _METHODS[-1]), "mgpu_core_wraps"):  # the last one: another thread may be at the first
        return
    for name in _METHODS:
        setattr(Module, name, _wrapped(getattr(Module, name)))
