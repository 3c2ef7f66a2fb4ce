"""Read a module tree once: its modules, their tensors, and the data to make replicas from.

``Module.parameters()`` and ``modules()`` build a dotted name for everything they yield; in every forward pass of a
large model that costs more than the copies.  Here the tree is walked by its dictionaries, and everything is numbered,
so that any number of replicas can be wired from one walk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mgpu_core.trees.layer_holders import attributes_that_reach

__all__ = [
    "ModuleNode",
    "ModuleTree",
    "check_initialised",
    "missing_attribute",
    "modules_of",
    "tensors_of",
    "wrapped_of",
]


def modules_of(module: Module) -> list[Module]:
    """Return the module and all below it, each once."""
    seen = {id(module)}
    modules = [module]
    for parent in modules:
        for child in parent._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modules


def named_parameters_of(module: Module) -> Iterator[tuple[str, Parameter]]:
    """Yield all parameters, each once, even where the module's class overrides ``named_parameters``."""
    return Module.named_parameters(module)


def parameters_of(module: Module) -> list[Parameter]:
    """Return all parameters, each once; see :func:`named_parameters_of`."""
    return [parameter for _, parameter in named_parameters_of(module)]


def tensors_of(module: Module) -> list[torch.Tensor]:
    """Return parameters and buffers of all modules; shared ones as often as they are found."""
    tensors: list[torch.Tensor | None] = []
    for submodule in modules_of(module):
        tensors += [*submodule._parameters.values(), *submodule._buffers.values()]
    return [tensor for tensor in tensors if tensor is not None]


def check_initialised(tensors: Iterable[torch.Tensor], cut: Module | None = None) -> None:
    """Raise ValueError, as torch does, at a parameter of a lazy module that has no shape yet.

    Args:
        tensors: to check.
        cut: a module whose tensors would be copied in pieces or buckets: TypeError at quantized ones, by their name.
    """
    for tensor in tensors:
        if type(tensor) is Parameter or type(tensor) is torch.Tensor:
            continue
        if is_lazy(tensor):
            raise ValueError(
                "Attempted to use an uninitialized parameter: modules with uninitialized parameters can't be used "
                "with `DataParallel`. Run a dummy forward pass to correctly initialize the modules"
            )
        if cut is not None and (text := wrapped_of(cut)) is not None:
            raise TypeError(f"{text}, which cannot be cut or sent in buckets: use place() or Pipeline")


def wrapped_of(net: Module) -> str | None:
    """Return which tensor of a module is made of others, such as quantized weights, as a sentence's beginning."""
    named = chain(net.named_parameters(), net.named_buffers())
    wrapped = ((name, each) for name, each in named if is_traceable_wrapper_subclass(each))
    return next((f"{name} of {type(net).__name__} is a {type(each).__name__}" for name, each in wrapped), None)


class _Kind:
    """Facts that hold for all modules of a class; computed once per class.

    Attributes:
        is_script: it is a ScriptModule, whose children must be, too.
        is_wrapper: True for the wrapper that ``torch.compile(module)`` returns.
        is_ordinary: a replica is a copy of the module's ``__dict__``.
        meets: its ranks wait for each other in the forward, as in a synchronised layer.
        shares_state: its forward adds to tensors that replicas share, as a metric of torchmetrics does.
    """

    __slots__ = ("is_ordinary", "is_script", "is_wrapper", "meets", "shares_state")

    def __init__(self, kind: type[Module]) -> None:
        self.is_script = issubclass(kind, torch.jit.ScriptModule)
        self.is_wrapper = is_compile_wrapper(kind)
        self.is_ordinary = (
            kind.__setattr__ is Module.__setattr__
            and kind._replicate_for_data_parallel is Module._replicate_for_data_parallel
            and not self.is_script
        )
        self.meets: bool = getattr(kind, "ranks_meet", False)
        self.shares_state = any(base.__module__ == "torchmetrics.metric" for base in kind.__mro__)


_kinds: dict[type[Module], _Kind] = {}
_KEPT = 4096  # entries, which classes made in a loop could otherwise fill without end


def _kind_of(kind: type[Module]) -> _Kind:
    facts = _kinds.get(kind)
    if facts is None:
        if len(_kinds) >= _KEPT:
            _kinds.clear()
        facts = _kinds[kind] = _Kind(kind)
    return facts


def is_compile_wrapper(kind: type[Module]) -> bool:
    """Return True for the wrapper that ``torch.compile(module)`` returns; does not import torch's compiler."""
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)  # lacks while it is loaded
    return wrapper is not None and issubclass(kind, wrapper)


class ModuleNode:
    """One module of the tree, and the nodes that its replicas refer to.

    Attributes:
        module: the module.
        kind: the facts of its class.
        parameters, buffers: (name, index into the tree's list).
        children: (name, index into the tree's nodes).
        absent: names of parameters that are registered as None.
        holders: names of other attributes that reach modules of this tree: containers and bound methods.
        compiled: the compiled callable: the module itself after ``module.compile()``, or its wrapper, which has no node
            of its own; ``None`` for a module that is not compiled.
    """

    __slots__ = ("absent", "buffers", "children", "compiled", "holders", "kind", "module", "parameters")

    def __init__(self, module: Module, kind: _Kind, compiled: Module | None) -> None:
        self.module, self.kind, self.compiled = module, kind, compiled
        self.parameters: Sequence[tuple[str, int]] = ()
        self.buffers: Sequence[tuple[str, int]] = ()
        self.children: list[tuple[str, int]] = []
        self.absent: Mapping[str, None] = {}
        self.holders: Sequence[str] = ()


class ModuleTree:
    """The modules in the order of ``network.modules()``, each once, and their tensors in the order of their first use.

    Attributes:
        nodes: one per module; the network's own is the first.
        parameters, buffers: each tensor once, also where it has several names (tied weights).
        tensors: all parameters, then all buffers.
        is_compiled: whether some module was compiled.
        ranks_meet: whether some module waits for other ranks in its forward.
        takes_turns: whether ranks must run one after the other: some module adds to tensors that replicas share.
        indices: by the id of each module, and of its compiled wrapper, the index of its node.
        has_holders: whether some module has another attribute that reaches modules: a container, a bound method.
        classes: of the modules.
        others: the indices of nodes whose modules are not ordinary.

    Raises:
        RuntimeError: Python modules inside a ScriptModule.
    """

    def __init__(self, network: Module) -> None:
        self.nodes: list[ModuleNode] = []
        self.parameters: list[Parameter] = []
        self.buffers: list[torch.Tensor] = []
        self.is_compiled = self.ranks_meet = self.takes_turns = False
        self.indices: dict[int, int] = {}
        self._tensor_indices: dict[int, int] = {}  # by id: of tensors in their lists
        self._read(network)
        self.tensors: list[torch.Tensor] = [*self.parameters, *self.buffers]
        self._modules = [node.module for node in self.nodes]
        self.classes: list[type[Module]] = list(map(type, self._modules))
        self.others = [index for index, node in enumerate(self.nodes) if not node.kind.is_ordinary]
        holders = attributes_that_reach(self._modules, self.indices.keys())
        self.has_holders = holders is not None
        for node, names in zip(self.nodes, holders or (), strict=False):
            node.holders = names
        self._found = None if self.is_compiled or any(node.kind.is_script for node in self.nodes) else self._find()

    def _find(self) -> list[Any]:
        """Return the objects that the tree was read from, by loops that run in C."""
        tables: list[dict[str, Any]] = list(chain(*map(_tables_of, self._modules)))
        return [
            list(map(len, tables)),
            list(chain(*tables)),
            list(map(id, chain(*map(dict.values, tables)))),
            list(map(type, self._modules)),
            list(map(_compiled_of, self._modules)),
        ]

    def is_current(self) -> bool:
        """Return whether reading the network again would find the same modules and tensors under the same names.

        Trees with compiled modules, scripts, or other attributes that reach modules never are.
        """
        if self._found is None or self.has_holders or self._find() != self._found:
            return False
        return attributes_that_reach(self._modules, self.indices.keys()) is None

    def _read(self, network: Module) -> None:
        """Fill the lists.  It runs in every forward pass, and is written for few Python calls per module."""
        indices, nodes = self.indices, self.nodes
        waiting: list[tuple[Module, list[tuple[str, int]], str]] = [(network, [], "")]
        count = 0
        while waiting:
            module, siblings, name = waiting.pop()
            key = id(module)
            if key not in indices:
                kind = _kinds[type(module)] if type(module) in _kinds else _kind_of(type(module))
                compiled: Module | None = None
                if kind.is_wrapper or "_compiled_call_impl" in module.__dict__:
                    compiled, module = _unwrapped(module)
                    kind = _kind_of(type(module))
                    self.is_compiled |= compiled is not None
                if compiled is not None and id(module) in indices:  # its module is in the tree without the wrapper, too
                    indices[key] = indices[id(module)]
                    nodes[indices[key]].compiled = compiled
                else:
                    indices[key] = indices[id(module)] = count
                    count += 1
                    node = ModuleNode(module, kind, compiled)
                    nodes += (node,)
                    self.ranks_meet |= kind.meets
                    self.takes_turns |= kind.shares_state
                    waiting += self._contents(module, kind, node)
            siblings += ((name, indices[key]),)

    def _contents(self, module: Module, kind: _Kind, node: ModuleNode) -> list[Any]:
        """Index the module's tensors, and return its children, the last one first."""
        if module._parameters:
            node.parameters = self._numbered(module._parameters, self.parameters)
            if len(node.parameters) < len(module._parameters):
                node.absent = {name: None for name, parameter in module._parameters.items() if parameter is None}
        if module._buffers:  # absent ones are in the dictionary that a replica copies
            node.buffers = self._numbered(module._buffers, self.buffers)
        if not module._modules:
            return []
        children = [(child, node.children, name) for name, child in module._modules.items() if child is not None]
        if kind.is_script:
            _check_script(children)
        return children[::-1]

    def _numbered(self, named: Any, tensors: list[Any]) -> list[tuple[str, int]]:
        """Return (name, index) of those that are there; appends new ones to ``tensors``."""
        numbered: list[tuple[str, int]] = []
        indices, count = self._tensor_indices, len(tensors)
        for name, tensor in named.items():
            if tensor is not None:
                index = indices.setdefault(id(tensor), count)
                if index == count:
                    tensors += (tensor,)
                    count += 1
                numbered += ((name, index),)
        return numbered

    @property
    def modes(self) -> bytes:
        """Return whether each module is in training mode."""
        try:
            return bytes(map(_mode_of, self.nodes))
        except AttributeError:  # a frozen script has no mode
            return bytes(getattr(node.module, "training", False) for node in self.nodes)


_tables_of = attrgetter("_parameters", "_buffers", "_modules")
_mode_of = attrgetter("module.training")
_compiled_of = attrgetter("_compiled_call_impl")


def _unwrapped(module: Module) -> tuple[Module | None, Module]:
    """Return the compiled wrapper of the module, or ``None``, and the module itself."""
    compiled: Module | None = None
    while _kind_of(type(module)).is_wrapper:
        compiled, module = module, module.get_submodule("_orig_mod")
    if compiled is None and module.__dict__.get("_compiled_call_impl") is not None:
        compiled = module
    return compiled, module


def _check_script(children: list[Any]) -> None:
    for child, _, _ in children:
        if not isinstance(child, torch.jit.ScriptModule):
            raise RuntimeError("Cannot replicate network where python modules are children of ScriptModule")


def missing_attribute(wrapper: object, name: str, module: object, method: str, value: str) -> AttributeError:
    """Return the error.

    Args:
        wrapper: lacks the attribute.
        name: of the attribute.
        module: that is wrapped.
        method, value: the ways to a method and to another attribute, with ``{name}``.
    """
    kind = type(wrapper).__name__
    text = f"{kind!r} object has no attribute {name!r}"
    if not name.startswith("_"):
        with suppress(Exception):  # hasattr(wrapper, name) must not raise what a property of the module does
            way = method if callable(getattr(module, name)) else value
            text += f", which is its module's: {way.format(name=name)}"
    return AttributeError(text, name=name, obj=wrapper)
