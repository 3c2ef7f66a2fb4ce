"""A module tree, read once: its modules, their tensors, and how a twin of each is made.

``Module.parameters()`` and ``modules()`` build a dotted name for everything they yield; in every forward of a large
model that costs more than the copies.  Here the tree is walked by its dictionaries, and everything is numbered, so that
any number of twins can be wired from one walk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from types import MethodType
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from mgpu_core.twin_hooks import SHARES_HOOKS

__all__ = [
    "ModuleTree",
    "Place",
    "check_initialised",
    "draws_random_numbers",
    "is_compile_wrapper",
    "modules_of",
    "tensors_of",
]


def modules_of(module: Module) -> Iterator[Module]:
    """The module and all below it, each once."""
    seen = {id(module)}
    found = [module]
    for each in found:
        yield each
        for child in each._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)


def named_parameters_of(module: Module) -> Iterator[tuple[str, Parameter]]:
    """All that there are, each once; a class of the user's own may show fewer."""
    return Module.named_parameters(module)


def parameters_of(module: Module) -> list[Parameter]:
    """The same without their names."""
    return [parameter for _, parameter in named_parameters_of(module)]


def tensors_of(module: Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers of all modules; shared ones as often as they are met."""
    for each in modules_of(module):
        for tensors in (each._parameters, each._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    yield tensor


_DRAW_ALWAYS = (torch.nn.FractionalMaxPool2d, torch.nn.FractionalMaxPool3d)
_DRAW_IN_TRAINING = (torch.nn.RReLU, torch.jit.ScriptModule)  # what a script does is written in C++


def draws_random_numbers(module: Module) -> bool:
    """Whether a forward of this module, as it is now, looks as if it drew random numbers.

    Torch's modules are known.  Others give themselves away by an attribute: dropout has a rate above zero, in ``p`` or
    something with ``drop`` in its name.  What draws without such a sign is not seen.
    """
    return any(
        isinstance(each, _DRAW_ALWAYS)
        or (getattr(each, "training", False) and (isinstance(each, _DRAW_IN_TRAINING) or _has_rate(each)))
        for each in modules_of(module)
    )


def _has_rate(module: Module) -> bool:
    attributes = vars(module)
    return any(
        isinstance(rate := attributes[name], Real) and float(rate) > 0 for name in _names_of_rates(tuple(attributes))
    )


@lru_cache(maxsize=4096)
def _names_of_rates(attributes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in attributes if name == "p" or "drop" in name.lower())


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

    def named(self, tensors: Mapping[str, torch.Tensor | None]) -> Sequence[tuple[str, int]]:
        """(name, number) of each that is there."""
        found = []
        for name, tensor in tensors.items():
            if tensor is not None:
                number = self._numbers.setdefault(id(tensor), len(self.tensors))
                if number == len(self.tensors):
                    self.tensors.append(tensor)
                found.append((name, number))
        return found


class _Kind:
    """What a class of modules has to say about its twins; asked once per class, not once per module."""

    __slots__ = ("ordinary", "script", "wrapper")

    def __init__(self, kind: type[Module]) -> None:
        self.script = issubclass(kind, torch.jit.ScriptModule)
        self.wrapper = is_compile_wrapper(kind)
        self.ordinary = (
            kind.__setattr__ is Module.__setattr__
            and kind._replicate_for_data_parallel is Module._replicate_for_data_parallel
            and not self.script
        )


def is_compile_wrapper(kind: type[Module]) -> bool:
    """Whether it is what ``torch.compile(module)`` returns; without importing torch's compiler to find out."""
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)  # lacks while it is loaded
    return wrapper is not None and issubclass(kind, wrapper)


class Place:
    """One module of the tree: what its twins are wired to, by number.

    Attributes:
        kind: the module's class.
        template: the attributes of a twin, to be copied, with places for what is its own; ``None`` for a module with
            its own way to make twins or to set attributes.
        parameters, buffers, children: (name, number).
        absent: parameters that are registered as None.
        methods: (name, function, number): attributes that hold a bound method of a module of this tree.
        compiled: what compiled the module: itself after ``module.compile()``, or its wrapper, which has no place of its
            own; ``None`` for a module that is not compiled.
    """

    __slots__ = ("absent", "buffers", "children", "compiled", "kind", "methods", "module", "parameters", "template")

    def __init__(self, module: Module) -> None:
        self.module, self.kind = module, type(module)
        self.template: dict[str, Any] | None = None
        self.parameters: Sequence[tuple[str, int]] = ()
        self.buffers: Sequence[tuple[str, int]] = ()
        self.children: Sequence[tuple[str, int]] = ()
        self.absent: Sequence[str] = ()
        self.methods: Sequence[tuple[str, Any, int]] = ()
        self.compiled: Module | None = None

    def make_template(self) -> dict[str, Any]:
        """What ``Module._replicate_for_data_parallel`` copies; a copied dictionary that grows is allocated twice."""
        template = self.module.__dict__.copy()
        template["_is_replica"] = True
        template[SHARES_HOOKS] = True
        template["_former_parameters"] = {}  # read only: twins without parameters share it
        for name, _ in self.parameters:
            template[name] = None
        return template


class ModuleTree:
    """The module tree in the order of ``network.modules()``, each module once.

    Raises:
        RuntimeError: Python modules inside a ScriptModule.
    """

    def __init__(self, network: Module) -> None:
        self.parameters = _Numbered()
        self.buffers = _Numbered()
        self.places: list[Place] = []
        self._numbers: dict[int, int] = {}
        self._kinds: dict[type[Module], _Kind] = {}
        self._visit(network)
        for place in self.places:
            # A search that runs in C: almost no module has such an attribute.
            if MethodType in map(type, place.module.__dict__.values()):
                place.methods = self._methods_of(place.module)

    def _visit(self, module: Module) -> int:
        known = self._numbers.get(id(module))
        if known is not None:
            return known
        kind = self._kinds.get(type(module)) or self._kinds.setdefault(type(module), _Kind(type(module)))
        if kind.wrapper:
            number = self._numbers[id(module)] = self._visit(module.get_submodule("_orig_mod"))
            self.places[number].compiled = module
            return number
        number = self._numbers[id(module)] = len(self.places)
        place = Place(module)
        if module.__dict__.get("_compiled_call_impl") is not None:
            place.compiled = module
        self.places.append(place)
        if parameters := module._parameters:
            place.parameters = self.parameters.named(parameters)
            if len(place.parameters) != len(parameters):
                place.absent = [name for name, parameter in parameters.items() if parameter is None]
        if buffers := module._buffers:  # absent buffers and children are in the dictionaries that a twin copies
            place.buffers = self.buffers.named(buffers)
        if children := module._modules:
            place.children = [
                (name, self._visit(_allowed(child, kind))) for name, child in children.items() if child is not None
            ]
        if kind.ordinary:
            place.template = place.make_template()
        return number

    def _methods_of(self, module: Module) -> list[tuple[str, Any, int]]:
        """A twin's attribute must hold its own module's method, not the original's."""
        found = []
        for name, value in module.__dict__.items():
            if type(value) is MethodType:
                owner = self._numbers.get(id(value.__self__))
                if owner is not None:
                    found.append((name, value.__func__, owner))
        return found


def _allowed(child: Module, parent: _Kind) -> Module:
    if parent.script and not isinstance(child, torch.jit.ScriptModule):
        raise RuntimeError("Cannot replicate network where python modules are children of ScriptModule")
    return child
