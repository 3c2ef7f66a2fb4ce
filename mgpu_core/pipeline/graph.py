"""Take a module apart into stages that run one after the other.

Only the code that calls the split points is traced, by ``torch.fx``: the forward of the module itself and of the
modules around a split point.  It runs once with symbols, so it must not decide by their values; all other modules are
called as they are.  A value that a later stage needs is sent there directly, past the stages between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn import Module

from mgpu_core.trees.nested import Tree, flatten

__all__ = ["Program", "ProgramCache", "Stage"]


class Stage:
    """A part of the module's code.

    Attributes:
        index: its position.
        reads: the names of values that inputs or earlier stages give it.
        gives: the names of values that later stages read.
        nodes: the operations, in order.
        modules, attributes: the names of the modules that it calls, and of the tensors of the root that it reads.
    """

    def __init__(self, index: int, nodes: Sequence[fx.Node]) -> None:
        self.index, self.nodes = index, nodes
        own = set(nodes)
        read = [each for node in nodes for each in node.all_input_nodes if each not in own]
        self.reads = list(dict.fromkeys(node.name for node in read))
        self.gives = [node.name for node in nodes if any(user not in own for user in node.users)]
        self.modules = list(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))
        self.attributes = list(dict.fromkeys(str(node.target) for node in nodes if node.op == "get_attr"))
        kept = {*self.gives, *(node.name for node in nodes if node.op == "output")}
        self._spent = _last_uses(nodes, kept)

    def run(self, values: dict[str, Any], find: Callable[[str], Any]) -> dict[str, Any]:
        """Run the stage on one micro-batch.

        Args:
            values: those of ``reads``, by name.
            find: returns the module or tensor of a name.

        Returns:
            The values of ``gives`` by name; the last stage gives the module's output as ``output``.
        """
        values = dict(values)
        for node, spent in zip(self.nodes, self._spent, strict=True):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: values[each.name])
            values[node.name] = _result(node, args, kwargs, find)
            del args, kwargs
            for name in spent:
                del values[name]
        return values


def _result(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], find: Callable[[str], Any]) -> Any:
    if node.op == "call_module":
        return find(str(node.target))(*args, **kwargs)
    if node.op == "call_function":
        assert callable(node.target)
        return node.target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return find(str(node.target)) if node.op == "get_attr" else args[0]  # the output


def _last_uses(nodes: Sequence[fx.Node], kept: set[str]) -> list[list[str]]:
    """Return, per node, the names of values that nothing after it uses, and that no other stage reads."""
    seen, spent = set(kept), []
    for node in reversed(nodes):
        names = dict.fromkeys(each.name for each in (*node.all_input_nodes, node))
        spent.append([name for name in names if name not in seen])
        seen.update(names)
    return spent[::-1]


class Program:
    """The stages of a module for one form of its arguments.

    Args:
        root: the module.
        split_points: the names of the modules at which stages after the first begin.
        arguments: ``(args, kwargs)`` of a call.

    Attributes:
        stages: in order.
        inputs: the names of the tensors of the arguments, in their order.
        producers: per stage the stages whose values it reads.
        readers: per stage the stages that read its values.
        consumers: per value the stages that read it.
        sharers: per stage the names of modules and tensors that use a parameter of another stage; empty until known.

    Raises:
        ValueError: a split point is not called, or not in this order; the code cannot be traced, with the reason.
    """

    def __init__(self, root: Module, split_points: Sequence[str], arguments: Any) -> None:
        graph = _Tracer(root, split_points).traced(arguments)
        self.inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
        groups: list[list[fx.Node]] = [[] for _ in range(len(split_points) + 1)]
        for node in graph.nodes:
            if node.op != "placeholder":
                groups[-1 if node.op == "output" else node.meta["stage"]].append(node)
        self.stages = [Stage(index, nodes) for index, nodes in enumerate(groups)]
        self.consumers: dict[str, list[int]] = {}
        for stage in self.stages:
            for name in stage.reads:
                self.consumers.setdefault(name, []).append(stage.index)
        owner = {name: stage.index for stage in self.stages for name in stage.gives}
        self.producers = [sorted({owner[name] for name in stage.reads if name in owner}) for stage in self.stages]
        indices = range(len(self.stages))
        self.sharers: list[list[str]] = []
        self.readers = [[reader for reader in indices if stage in self.producers[reader]] for stage in indices]


class ProgramCache:
    """The programs of a module, by the form of the arguments and by the modes of the traced modules."""

    _KEPT = 64

    def __init__(self, root: Module, split_points: Sequence[str]) -> None:
        self._root, self._split_points = root, list(split_points)
        self._programs: dict[Hashable, Program] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ProgramCache, (self._root, self._split_points)

    def clear(self) -> None:
        """Forget all programs: the module has changed."""
        self._programs.clear()

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, list[torch.Tensor]]:
        """Return the program for these arguments, and their tensors in its order."""
        leaves: list[Any] = []
        tree = flatten((args, kwargs), leaves, "inputs", whole=True)
        constants = [None if isinstance(leaf, torch.Tensor) else _key_of(leaf) for leaf in leaves]
        modes = [each.training for each in traced_modules(self._root, self._split_points)]
        key = (_form_of(tree), *constants, *modes)
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= self._KEPT:
                self._programs.clear()
            program = self._programs[key] = Program(self._root, self._split_points, (args, kwargs))
        return program, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _form_of(tree: Tree) -> Hashable:
    return tree.kind, tree.names, tuple(map(_form_of, tree.children))


def _key_of(leaf: Any) -> Hashable:
    """Return a key of an argument that is no tensor, and that the code may decide by."""
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), leaf


def traced_modules(root: Module, split_points: Sequence[str]) -> list[Module]:
    """Return the modules whose own code is traced: the root, and all others around a split point."""
    around = {name[:i] for name in split_points for i, letter in enumerate(name) if letter == "."}
    return [root, *(root.get_submodule(name) for name in sorted(around))]


_tracing = threading.Lock()  # torch.fx patches torch.nn.Module while it traces


class _Tracer(fx.Tracer):
    """Trace the code around the split points, and note each operation's stage.

    While it traces, other threads may call modules too; torch.fx sends their calls here, and they go on as they are.
    """

    def __init__(self, root: Module, split_points: Sequence[str]) -> None:
        super().__init__()
        self._module, self._split_points = root, split_points
        self._leaves = [id(each) for each in traced_modules(root, split_points)]
        self._stage, self._thread = 0, threading.get_ident()
        self._is_empty = True  # nothing is in the stage yet
        self._arguments: Any = None

    def traced(self, arguments: Any) -> fx.Graph:
        """Return the graph of a call with these arguments; each tensor of them is a placeholder."""
        self._arguments = arguments
        for name in self._split_points:
            try:
                self._module.get_submodule(name)
            except AttributeError as error:
                raise ValueError(f"split_points has {name!r}, which is no module of {_kind(self._module)}") from error
        with _tracing:
            try:
                graph = self.trace(self._module)
            except _NotInOrder as error:
                raise ValueError(str(error)) from None
            except Exception as error:
                raise ValueError(
                    f"{_kind(self._module)} cannot be cut at {', '.join(self._split_points) or 'no point'}: its code "
                    f"around them was run with symbols for its tensors, and raised {type(error).__name__}: {error}. "
                    "Cut inside other modules, or pass a list of modules"
                ) from error
        if self._stage < len(self._split_points):
            raise ValueError(f"split point {self._split_points[self._stage]!r} is not called in the forward")
        return graph

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Return the forward with symbols in place of its tensors, as torch.fx calls it."""
        leaves: list[Any] = []
        tree = flatten(self._arguments, leaves, "inputs", whole=True)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[position] = self.create_proxy("placeholder", f"input_{position}", (), {})
        args, kwargs = tree.unflatten(iter(leaves))
        return partial(root_fn.__get__(self._module), *args, **kwargs), []

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Return whether a module is called as it is."""
        return id(m) not in self._leaves

    def call_module(self, m: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin the next stage at its split point."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        ahead, name = self._split_points[self._stage :], self.path_of_module(m)
        if ahead and m is self._module.get_submodule(ahead[0]) and not self._is_empty:
            self._stage, self._is_empty = self._stage + 1, True
        elif name in ahead[1:]:
            raise _NotInOrder(f"split point {name!r} is called before {ahead[0]!r}: list them in the forward's order")
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return a symbol for a parameter, in the thread that traces."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Note the stage of a new operation."""
        node = super().create_node(*args, **kwargs)
        node.meta["stage"] = self._stage
        self._is_empty &= node.op == "placeholder"
        return node


class _NotInOrder(Exception):
    pass


def _kind(module: Module) -> str:
    return type(module).__name__
