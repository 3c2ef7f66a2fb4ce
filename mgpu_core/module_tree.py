"""A module tree, read once: its modules, their tensors, and how a twin of each is made.

``Module.parameters()`` and ``modules()`` build a dotted name for everything they yield; in every forward of a large
model that costs more than the copies.  Here the tree is walked by its dictionaries, and everything is numbered, so that
any number of twins can be wired from one walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

__all__ = ["ModuleTree", "Place", "check_initialised", "tensors_of"]


def tensors_of(module: Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers of all modules; shared ones as often as they are met."""
    seen = {id(module)}
    found = [module]
    for each in found:
        for tensors in (each._parameters, each._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    yield tensor
        for child in each._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)


def check_initialised(tensors: Iterable[torch.Tensor]) -> None:
    """Raises ValueError, as torch's, at a parameter of a lazy module that has no shape yet."""
    for tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(
                "Attempted to use an uninitialized parameter: modules with uninitialized parameters can't be used "
                "with `DataParallel`. Run a dummy forward pass to correctly initialize the modules"
            )


class _Numbered:
    """Tensors in the order in which they are first met; one that comes twice (tied weights) has one number."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return number


class Place:
    """One module of the tree: what its twins are wired to, by number."""

    __slots__ = ("absent", "buffers", "children", "make", "methods", "module", "parameters", "plain")

    def __init__(self, module: Module) -> None:
        kind = type(module)
        self.module = module
        self.plain = kind.__setattr__ is Module.__setattr__ and not isinstance(module, torch.jit.ScriptModule)
        ordinary = kind._replicate_for_data_parallel is Module._replicate_for_data_parallel
        self.make: Callable[[], Any] = (
            _copier(module) if self.plain and ordinary else module._replicate_for_data_parallel
        )
        self.parameters: list[tuple[str, int]] = []
        self.buffers: list[tuple[str, int]] = []
        self.children: list[tuple[str, int]] = []
        self.absent: list[str] = []  # parameters that are registered as None
        self.methods: list[tuple[str, Any, int]] = []


class ModuleTree:
    """The module tree in the order of ``network.modules()``, each module once."""

    def __init__(self, network: Module) -> None:
        self.parameters = _Numbered()
        self.buffers = _Numbered()
        self.places: list[Place] = []
        self._numbers: dict[int, int] = {}
        self._visit(network)
        for place in self.places:
            self._find_methods(place)

    def _visit(self, module: Module) -> int:
        known = self._numbers.get(id(module))
        if known is not None:
            return known
        number = self._numbers[id(module)] = len(self.places)
        place = Place(module)
        self.places.append(place)
        for name, parameter in module._parameters.items():
            if parameter is None:
                place.absent.append(name)
            else:
                place.parameters.append((name, self.parameters.number(parameter)))
        for name, buffer in module._buffers.items():
            if buffer is not None:  # absent buffers and children are in the dictionaries that a twin copies
                place.buffers.append((name, self.buffers.number(buffer)))
        script = isinstance(module, torch.jit.ScriptModule)
        for name, child in module._modules.items():
            if child is None:
                continue
            if script and not isinstance(child, torch.jit.ScriptModule):
                raise RuntimeError("Cannot replicate network where python modules are children of ScriptModule")
            place.children.append((name, self._visit(child)))
        return number

    def _find_methods(self, place: Place) -> None:
        """Attributes that hold a bound method of a module of this tree: a twin's must be its own module's."""
        for name, value in place.module.__dict__.items():
            if type(value) is MethodType:
                owner = self._numbers.get(id(value.__self__))
                if owner is not None:
                    place.methods.append((name, value.__func__, owner))


def _copier(module: Module) -> Callable[[], Module]:
    """What ``Module._replicate_for_data_parallel`` does, without its attribute lookups."""
    new, assign, kind = object.__new__, object.__setattr__, type(module)
    template = module.__dict__.copy()
    template["_is_replica"] = True
    copy, buffers, children = template.copy, template["_buffers"].copy, template["_modules"].copy

    def make() -> Module:
        twin: Module = new(kind)
        attributes = copy()
        attributes["_parameters"] = {}
        attributes["_former_parameters"] = {}
        attributes["_buffers"] = buffers()
        attributes["_modules"] = children()
        assign(twin, "__dict__", attributes)  # past Module.__setattr__, which looks at everything first
        return twin

    return make
