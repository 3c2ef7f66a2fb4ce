"""Whether a module is still as it was left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from types import MethodType
from typing import Any

from torch.nn import Module, Parameter

from mgpu_core.device.tensor_checks import memory_questions
from mgpu_core.look import Look

__all__ = ["HOOKS", "hook_kinds", "module_hooks", "module_look"]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CONTAINERS = ("_parameters", "_modules", *HOOKS)
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_parameter_hooks_of: Callable[[Parameter], tuple[Any, ...]] = attrgetter(*_PARAMETER_HOOKS)
_module_hooks_of: Callable[[Module], tuple[Any, ...]] = attrgetter(*HOOKS)


def module_hooks(modules: Sequence[Module]) -> list[int]:
    """The hooks around the forwards and backwards of modules, each by its number, which no other one gets."""
    return list(chain.from_iterable(chain.from_iterable(map(_module_hooks_of, modules))))


def hook_kinds(module: Module) -> list[list[Any]]:
    """What the hooks around a module's forward and backward do: the same of two modules that one code has hooked."""
    return [[_kind(hook) for hook in hooks.values()] for hooks in _module_hooks_of(module)]


def _kind(hook: Any) -> Any:
    """The code of a function, however often it was made; of something else that can be called, its class."""
    while isinstance(hook, partial | MethodType):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    return getattr(hook, "__code__", type(hook))


def module_look(modules: Sequence[Module], parameters: Sequence[Parameter]) -> Look:
    """Over as soon as modules, parameters, their memory, modes or hooks are others.

    Args:
        modules: the module and all below it.
        parameters: theirs.
    """
    containers = [getattr(module, name) for module in modules for name in _CONTAINERS]
    containers += [hooks for each in parameters for hooks in _parameter_hooks_of(each) if hooks is not None]
    attributes: list[tuple[Any, str]] = [(module, name) for module in modules for name in ("training", *_CONTAINERS)]
    attributes += [(each, name) for each in parameters for name in ("requires_grad", "dtype", *_PARAMETER_HOOKS)]
    scripts = [each for each in containers if not isinstance(each, dict)]  # whose containers are views of C++'s
    values = [partial(_values_of, each) for each in scripts]
    containers = [each for each in containers if isinstance(each, dict)]
    return Look(containers, attributes, [*memory_questions(parameters), *values])


def _values_of(container: Any) -> tuple[Any, ...]:
    return tuple(container.values())
