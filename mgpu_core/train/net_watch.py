"""What becomes of the user's module between two steps: parameters that are others, elsewhere, or hooked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_

from torch.nn import Module, Parameter

from mgpu_core.device.tensor_checks import memory_of, moved_between
from mgpu_core.look import Look
from mgpu_core.module_tree import modules_of, parameters_of
from mgpu_core.train.module_look import hook_kinds, module_hooks, module_look
from mgpu_core.train.twins import other_hooks

__all__ = ["ADVICE", "NetWatch", "first_difference"]

ADVICE = "call step.rebuild() after such a change"


class NetWatch:
    """The module as the other ranks' copies know it.

    Args:
        net: the user's module.
        places: all modules in it, in one order.
        names: of its parameters.
        copies: the same of each other rank, whose modules lack hooks that the user puts on these later.

    Attributes:
        parameters: of the module, as they were found.
    """

    def __init__(
        self, net: Module, places: Sequence[Module], names: Sequence[str], copies: Sequence[Sequence[Module]]
    ) -> None:
        self._net, self._places, self._names, self._copies = net, places, names, copies
        self.remember()
        self.remember_hooks()
        self._remember_module_hooks()

    def remember(self) -> None:
        """Takes the parameters as they are now for what the next steps must find."""
        self._look: Look | None = None
        self.parameters = parameters_of(self._net)
        self._found = list(_parameters_of(self._net))
        self._memory = memory_of(self.parameters)

    def remember_hooks(self) -> None:
        """Takes the hooks that parameters have for those that the next steps must find."""
        self._look = None
        self._hooks = _hooks_of(self.parameters)
        self._hooks_of_copies = [_hooks_of(parameters_of(row[0])) for row in self._copies]

    def is_as_left(self) -> bool:
        """Whether nothing has changed since :meth:`leave`; asked in every step."""
        return self._look is not None and not self._look.is_over()

    def leave(self) -> None:
        """What is found now, all ranks have."""
        self._look = module_look(list(modules_of(self._net)), self.parameters)

    def check_parameters(self) -> None:
        """Raises RuntimeError unless the module has the parameters that it had."""
        found = list(_parameters_of(self._net))
        if len(found) != len(self._found) or not all(map(is_, found, self._found)):
            raise RuntimeError(
                f"the parameters of {type(self._net).__name__} are no longer those of this step: {ADVICE}"
            )

    def moved(self) -> list[int]:
        """Which parameters lie elsewhere than they did."""
        return moved_between(memory_of(self.parameters), self._memory)

    def check_hooks(self) -> None:
        """Raises RuntimeError unless parameters and modules have the hooks that they had; names which has not."""
        self._check_parameters_hooks()
        found = _module_hooks_of(self._places)
        if not self._copies or found == self._module_hooks:
            return
        for at, (now, then) in enumerate(zip(found, self._module_hooks, strict=True)):
            if now != then and not self._is_everywhere(at):
                name = self._name_of(self._places[at])
                raise RuntimeError(f"module {name} has got or lost a hook, which the other ranks lack: {ADVICE}")
        self._remember_module_hooks()

    def _check_parameters_hooks(self) -> None:
        """Forwards may put hooks on their own parameters, in the place of as many: then all ranks have others."""
        before, theirs_before = self._hooks, self._hooks_of_copies
        if _hooks_of(self.parameters) == before:
            return
        self.remember_hooks()
        for at, name in enumerate(self._names):
            now, then = self._hooks[at], before[at]
            pairs = zip(self._hooks_of_copies, theirs_before, strict=True)
            if now != then and (len(now) != len(then) or any(one[at] == other[at] for one, other in pairs)):
                self._hooks, self._hooks_of_copies = before, theirs_before
                raise RuntimeError(f"parameter {name} has got or lost a hook, which the other ranks lack: {ADVICE}")

    def _is_everywhere(self, at: int) -> bool:
        """Whether forwards have put hooks on their own modules, in all ranks: the others' have changed alike."""
        return all(
            module_hooks([row[at]]) != then[at] and hook_kinds(row[at]) == hook_kinds(self._places[at])
            for row, then in zip(self._copies, self._copies_hooks, strict=True)
        )

    def _remember_module_hooks(self) -> None:
        self._module_hooks = _module_hooks_of(self._places)
        self._copies_hooks = [_module_hooks_of(row) for row in self._copies]

    def _name_of(self, module: Module) -> str:
        return next((name for name, each in self._net.named_modules() if each is module), "") or type(module).__name__


def first_difference(now: Sequence[object], then: Sequence[object]) -> int:
    """The place of the first pair that is not equal."""
    return next(i for i, (one, other) in enumerate(zip(now, then, strict=True)) if one != other)


def _hooks_of(parameters: Sequence[Parameter]) -> list[list[int]]:
    """The user's, each by its number, which no other one gets."""
    return [[*(each._backward_hooks or ()), *other_hooks(each)] for each in parameters]


def _module_hooks_of(modules: Sequence[Module]) -> list[list[int]]:
    return [module_hooks([each]) for each in modules]


def _parameters_of(net: Module) -> Iterator[Parameter | None]:
    for module in modules_of(net):
        yield from module._parameters.values()
