"""Views: a module as one rank, or one call, sees it; other modules of the same classes, which share what they can.

``build_replica`` exchanges all tensors, for a rank or another stage; a :class:`ModuleView` keeps them, and exchanges
attributes, for a call.  :class:`StandIns` gives the module what a forward assigns on either.  A module that outlives
its original is a copy: see ``module_copy.py``.

A *note* is an attribute that holds nothing of a batch: a number, a text, the handle of a hook, a function.  A module
that changes its layers once, and notes that on itself (``if not self.is_ready: ...``), finds the note in later calls.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from mgpu_core.trees import replica_hooks
from mgpu_core.trees.filled import FilledCopies
from mgpu_core.trees.layer_holders import rewired
from mgpu_core.trees.module_tree import ModuleNode, ModuleTree
from mgpu_core.trees.replica_hooks import DICTIONARIES, NO_HOOKS, WeakMethod, have_hooks, own_hooks, weakened
from mgpu_core.trees.replica_parameters import as_parameters

__all__ = [
    "REWIRED",
    "ModuleView",
    "OwnForward",
    "StandIns",
    "attributes_of",
    "build_replica",
    "build_replicas",
    "is_note",
    "loosen",
]

_COMPILED = "_compiled_call_impl"  # what a module's call runs instead of its forward, if it is there
REWIRED = "_replica_holders"  # of a replica: which attributes of its modules were made again, as (module, name)
_NOTES = (
    *(bool, int, float, complex, str, bytes, type(None), type, FunctionType, MethodType, Enum),
    *(RemovableHandle, torch.dtype, torch.device),
)
TABLES = {
    *(name for name, value in vars(Module()).items() if isinstance(value, dict | set)),
    *("_compiled_call_impl", "_is_replica", "_former_parameters", REWIRED),
}
"""The attributes of a module that are torch's own: its tensors, children and hooks."""


def attributes_of(module: Module) -> dict[str, Any]:
    """Return the attributes of a module but for torch's own, and a forward that stands in for its own."""
    attributes = vars(module).items()
    return {name: value for name, value in attributes if name not in TABLES and not isinstance(value, OwnForward)}


def build_replicas(
    tree: ModuleTree,
    rows: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    compiled: Sequence[Sequence[tuple[int, Any]]],
) -> list[Any]:
    """Return a replica per rank, of its parameters, which become :class:`ReplicaParameter`, and its buffers."""
    replicas = [build_replica(tree, *row, calls)[0] for row, calls in zip(rows, compiled, strict=True)]
    as_parameters(tree.parameters, [parameters for parameters, _ in rows])
    return replicas


def build_replica(
    tree: ModuleTree,
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor] | None,
    compiled: Sequence[tuple[int, Any]],
) -> list[Any]:
    """Return the modules of a rank's replica of the tree's network, the network's first.

    They are copies of those of the tree's nodes, wired to each other and to the rank's tensors.

    Args:
        tree: the network as it is now.
        parameters, buffers: of the rank, in the tree's order; ``None``: the modules' own tables of buffers.
        compiled: for each compiled module the index of its node, and the callable of its replica.
    """
    if not replica_hooks.are_apart:
        replica_hooks.keep_hooks_apart()
    # Written out: a call of Python per module and rank would cost more than all else here.
    assign, shares_hooks = object.__setattr__, replica_hooks.SHARES_HOOKS
    replicas: list[Any] = list(map(object.__new__, tree.classes))
    for index in tree.others:
        replicas[index] = tree.nodes[index].module._replicate_for_data_parallel()
    held: list[tuple[Module, str]] = []
    hooked: list[tuple[ModuleNode, Any]] = []
    for node, replica in zip(tree.nodes, replicas, strict=True):
        if not node.kind.is_ordinary:
            _wire_by_setattr(node, replica, replicas, parameters, tree.buffers if buffers is None else buffers)
            if shares_hooks not in replica.__dict__:
                hooked += ((node, replica),)
            continue
        original = node.module.__dict__
        table: dict[str, Any] = {**node.absent}
        attributes = {**original, "_is_replica": True, "_former_parameters": table, "_parameters": table}
        if (
            original["_forward_hooks"]
            or original["_forward_pre_hooks"]
            or original["_backward_hooks"]
            or original["_backward_pre_hooks"]
        ):
            hooked += ((node, replica),)
        else:
            attributes |= NO_HOOKS
        for name, index in node.parameters:
            table[name] = parameters[index]
        if buffers is not None:
            below = attributes["_buffers"] = {**original["_buffers"]}
            for name, index in node.buffers:
                below[name] = buffers[index]
        below = attributes["_modules"] = {**original["_modules"]}
        for name, index in node.children:
            below[name] = replicas[index]
        assign(replica, "__dict__", attributes)  # past Module.__setattr__, which would find out what each of them is
    if tree.has_holders or hooked:
        replicas_by_id = {key: replicas[index] for key, index in tree.indices.items()}
        for node, replica in hooked:
            replica.__dict__.update(own_hooks(node.module.__dict__, replicas_by_id))
            held += [(replica, name) for name in DICTIONARIES]
        for node, replica in zip(tree.nodes, replicas, strict=True):
            for name in node.holders:
                replica.__dict__[name] = rewired(node.module.__dict__[name], replicas_by_id)
                held.append((replica, name))
    for index, function in compiled:
        replicas[index].__dict__[_COMPILED] = MethodType(function, replicas[index])
        held.append((replicas[index], _COMPILED))
    if held:
        replicas[0].__dict__[REWIRED] = held
    return replicas


def loosen(replicas: Iterable[Module]) -> None:
    """End the cycles of replicas that keep methods of their own, so that they are freed when their graph is.

    A bound method in an attribute holds its module, which holds the attribute: the copies of all parameters would stay
    until the garbage collector comes.  After the forward such an attribute holds its module weakly; code that took the
    method itself (a checkpoint that runs it again in backward) still has the real one.
    """
    for replica in replicas:
        for module, name in replica.__dict__.pop(REWIRED, ()):
            value = module.__dict__.get(name)
            if type(value) is MethodType:
                module.__dict__[name] = WeakMethod(value)
            elif name in DICTIONARIES and value:
                module.__dict__[name] = OrderedDict((key, weakened(hook)) for key, hook in value.items())


def _wire_by_setattr(
    node: ModuleNode,
    replica: Any,
    replicas: list[Any],
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
) -> None:
    """Wire a module that has a say in it: RNNs keep a second list of their weights, ScriptModules live in C++."""
    replica._former_parameters = {}  # torch's name for a replica's parameters
    if "_forward_hooks" in replica.__dict__ and not have_hooks(replica.__dict__):  # a ScriptModule keeps its own in C++
        replica.__dict__.update(NO_HOOKS)
    for name, index in node.children:
        setattr(replica, name, replicas[index])
    for name, index in node.parameters:
        setattr(replica, name, parameters[index])
        if name in replica.__dict__:  # it is no nn.Parameter, which alone is registered by assignment
            replica._parameters[name] = replica.__dict__.pop(name)
    for name, index in node.buffers:
        setattr(replica, name, buffers[index])
    for name in node.absent:
        replica._parameters[name] = None


def is_note(value: Any) -> bool:
    """Return whether an attribute holds nothing of a batch."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_note, value))
    if isinstance(value, list | set | dict):  # an empty one may be filled by each micro-batch
        return bool(value) and all(map(is_note, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _NOTES)


class StandIns:
    """Modules that stand in for others in one call, and what its forward assigns on them.

    Args:
        pairs: each module, and the one that stands in for it, with the attributes of the beginning.
    """

    def __init__(self, pairs: Iterable[tuple[Module, Module]]) -> None:
        self._made = [(module, other, {**vars(other), "_modules": {**other._modules}}) for module, other in pairs]

    @property
    def modules(self) -> list[Module]:
        """Return the modules that stand in for others."""
        return [other for _, other, _ in self._made]

    def assigned(self) -> dict[tuple[int, str], Any]:
        """Return the attributes that the forward has assigned, by the id of the module and the name."""
        return {(id(module), name): vars(other)[name] for module, other, name, _ in self._changed()}

    def _changed(self) -> Iterator[tuple[Module, Module, str, Any]]:
        """Yield the modules and the name of each attribute that was assigned, with its value of before."""
        for module, other, before in self._made:
            for name, value in vars(other).items():
                if value is not before.get(name, TABLES) and name not in TABLES:
                    yield module, other, name, before.get(name)

    def keep(
        self, is_kept: Callable[[int, Any, Any], bool], at_home: Callable[[Any], Any] = lambda value: value
    ) -> None:
        """Let the modules have what the forward has assigned, and lose what it has deleted.

        Args:
            is_kept: takes the id of a module, and an attribute's values before and now.
            at_home: returns a value for the module.
        """
        originals: dict[int, Any] = {id(other): module for module, other, _ in self._made}
        for module, other, name, value in self._changed():
            if is_kept(id(module), value, vars(other)[name]):
                vars(module)[name] = rewired(at_home(vars(other)[name]), dict(originals))
        for module, name, before, child in self._changed_children():
            if is_kept(id(module), before, child):
                vars(module).pop(name, None)
                module._modules[name] = originals.get(id(child), child)
        for module, other, before in self._made:
            for name in before.keys() - vars(other).keys() - other._modules.keys():
                if is_kept(id(module), before[name], None):
                    vars(module).pop(name, None)

    def added(self) -> list[str]:
        """Return the names of modules that the forward has added or replaced."""
        return [name for _, name, _, _ in self._changed_children()]

    def _changed_children(self) -> Iterator[tuple[Any, str, Any, Any]]:
        """Yield the module and the name of each child that was added or replaced, with the child before and now."""
        for module, other, before in self._made:
            for name, child in other._modules.items():
                if child is not before["_modules"].get(name):
                    yield module, name, before["_modules"].get(name), child


class ModuleView(StandIns):
    """A module as one call sees it: modules around layers are others, with attributes of their own.

    Their tables of parameters and buffers, their hooks, and the layers are the same objects.

    Args:
        root: the module.
        shared: ids of modules that all calls share.
        filled: by the ids of modules the names of containers that a forward fills: the view has copies.

    Attributes:
        root: the view.
        copies: of containers that this call may fill.
    """

    def __init__(self, root: Module, shared: Container[int], filled: Mapping[int, Iterable[str]] | None = None) -> None:
        self._shared, self._filled = shared, filled or {}
        self._views: dict[int, tuple[Module, Module]] = {}
        self.copies = FilledCopies()
        self.root = self._viewed(root)
        others = {**self.copies.of_originals, **{owner: view for owner, (_, view) in self._views.items()}}
        for _, view in self._views.values():
            state = vars(view)
            new = {name: rewired(value, dict(others)) for name, value in state.items() if isinstance(value, MethodType)}
            if have_hooks(state):  # a table that means nothing of the view stays, for hooks that the forward registers
                tables = own_hooks(state, others)
                new |= {name: table for name, table in tables.items() if table != state[name]}
            state.update(new)
        super().__init__(self._views.values())

    def _viewed(self, module: Module) -> Module:
        if id(module) in self._shared:
            return module
        if id(module) not in self._views:
            view = object.__new__(type(module))
            attributes = {**module.__dict__, "_compiled_call_impl": None}
            self._views[id(module)] = module, view
            for name in self._filled.get(id(module), ()):
                attributes[name] = self.copies.copied(attributes.get(name))
            if isinstance(forward := attributes.get("forward"), OwnForward):
                attributes["forward"] = forward.of(view)
            modules = {name: None if each is None else self._viewed(each) for name, each in module._modules.items()}
            object.__setattr__(view, "__dict__", {**attributes, "_modules": modules})
        return self._views[id(module)][1]

    def keep_notes(self, layers: Container[int] = ()) -> None:
        """Let the module have the notes of this call; layers, by their ids, have all their attributes."""
        self.keep(lambda owner, _, value: owner in layers or is_note(value))

    def end(self) -> None:
        """Let go of all but the copies."""
        self._views.clear()
        self._made.clear()
        del self.root


class OwnForward:
    """Stands in for the forward of a module, which it holds weakly; copies and pickles go along with the module's."""

    is_of_view = False

    def __init__(self, module: Module) -> None:
        self._module, self._own = weakref.ref(module), module.__dict__.get("forward")
        module.__dict__["forward"] = self

    @property
    def module(self) -> Module:
        """The module whose forward it is."""
        module = self._module()
        assert module is not None, "the module holds this object"
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward."""
        forward: Callable[..., Any] = self._own or MethodType(type(self.module).forward, self.module)
        return forward

    def of(self, view: Module, replacements: Mapping[int, Any] | None = None) -> OwnForward:
        """Return such an object for a view of the module.

        Args:
            view: the view.
            replacements: other objects that take the place of some, by the ids of these.
        """
        other = copy.copy(self)
        other._module, other.is_of_view = weakref.ref(view), True
        other._own = None if self._own is None else rewired(self._own, {**(replacements or {}), id(self.module): view})
        return other

    def remove(self) -> None:
        """Give the module its own forward back, unless it was given another one since."""
        if self.module.__dict__.get("forward") is not self:
            return
        del self.module.__dict__["forward"]
        if self._own is not None:
            self.module.__dict__["forward"] = self._own

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=weakref.ref(state["_module"]))
