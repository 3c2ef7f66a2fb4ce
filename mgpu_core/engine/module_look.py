"""Whether a module is still as it was left: asked in every step, so all of it is looked at in loops that run in C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch.nn import Module, Parameter

from mgpu_core.device.tensor_checks import memory_of

__all__ = ["HOOKS", "ModuleLook", "module_hooks"]

_members_of: Callable[[Module], tuple[Any, ...]] = attrgetter("_parameters", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_module_hooks_of: Callable[[Module], tuple[Any, ...]] = attrgetter(*HOOKS)
_mode_of: Callable[[Module], bool] = attrgetter("training")
_hooks_of: Callable[[Parameter], tuple[Any, ...]] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_requires_grad: Callable[[Parameter], bool] = attrgetter("requires_grad")


def module_hooks(modules: Sequence[Module]) -> list[int]:
    """The hooks around the forwards and backwards of modules, each by its number, which no other one gets."""
    return list(chain.from_iterable(chain.from_iterable(map(_module_hooks_of, modules))))


class ModuleLook:
    """What a module is made of, at the time when this is made.

    It may say that something has changed where nothing has; whoever then looks closely finds out.

    Args:
        modules: the module and all below it.
        parameters: theirs.
    """

    def __init__(self, modules: Sequence[Module], parameters: Sequence[Parameter]) -> None:
        self._modules, self._parameters = modules, parameters
        self._objects = self._objects_now()
        self._numbers = self._numbers_now()

    def is_over(self) -> bool:
        """Whether modules, parameters, their memory, modes or hooks are others now."""
        found = self._objects_now()
        same = len(found) == len(self._objects) and all(map(is_, found, self._objects))
        return not same or self._numbers_now() != self._numbers

    def _objects_now(self) -> list[object]:
        """What must be the very same."""
        members = list(chain.from_iterable(map(_members_of, self._modules)))
        return [
            *members,
            *chain.from_iterable([each.values() for each in members]),
            *map(_mode_of, self._modules),
            *chain.from_iterable(map(_hooks_of, self._parameters)),
            *map(_requires_grad, self._parameters),
        ]

    def _numbers_now(self) -> tuple[object, ...]:
        """What must be equal; a hook that comes or goes, does so in the dictionary that is there."""
        hooks = chain.from_iterable(map(_hooks_of, self._parameters))
        counts = [len(each) if each else 0 for each in hooks]
        return memory_of(self._parameters), counts, module_hooks(self._modules)
