"""Which device has which parameter and buffer; and the copies of those that several stages use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from mgpu_core.device.streams import hand_over
from mgpu_core.module_tree import ModuleTree, check_initialised, named_parameters_of
from mgpu_core.parallel.replicate_modules import build_replica, compiled_by_rank
from mgpu_core.pipeline.borders import Crossing, send
from mgpu_core.pipeline.graph import Program
from mgpu_core.replica_hooks import keep_hooks_apart

__all__ = ["MOVES", "Placement", "find_in", "is_spread", "move_to", "named_tensors", "refuse_moves"]

MOVES = ("to", "cuda", "cpu", "xpu", "to_empty")  # methods of a module that would bring it to one device


def find_in(root: Module, name: str) -> Any:
    """Return the module or tensor of a dotted name; the root itself for an empty one."""
    found: Any = root
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


def move_to(module: Module, name: str, device: torch.device) -> None:
    """Move a tensor of the module to a device in place: a Parameter stays the same object, and keeps its gradient."""
    owner, _, last = name.rpartition(".")
    tables = find_in(module, owner)
    parameter = tables._parameters.get(last)
    if parameter is None:
        tables._buffers[last] = tables._buffers[last].to(device)
        return
    parameter.data = parameter.data.to(device)
    if parameter.grad is not None:
        parameter.grad.data = parameter.grad.data.to(device)


def named_tensors(root: Module) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers, each once."""
    return [*named_parameters_of(root), *root.named_buffers()]


def is_spread(module: Module) -> bool:
    """Return whether the parts of a module were put on several devices, by ``place`` or ``Pipeline``."""
    return getattr(module.to, "__func__", module.to) is refuse_moves


def refuse_moves(*args: Any, **kwargs: Any) -> Any:
    """Stand in for ``to``, ``cuda`` and ``cpu`` of a module whose parts are on several devices.

    Raises:
        RuntimeError: it would bring all parts to one device.
    """
    raise RuntimeError(
        "this module's parts are on several devices: to(), cuda() and cpu() would bring them all to one. Change dtypes "
        "with half(), float(), bfloat16() or double(); for another placement, make it anew from the module"
    )


class Placement:
    """The tensors of a module, each on the device of the first stage that uses it.

    Args:
        root: the module; its tensors are moved in place.
        program: its stages.
        devices: one per stage.

    Raises:
        ValueError: a parameter without a shape; a module with buffers that several stages call.
    """

    def __init__(self, root: Module, program: Program, devices: Sequence[torch.device]) -> None:
        self._root, self._devices = root, devices
        check_initialised([*root.parameters(), *root.buffers()])
        self._check_buffers(program)
        first: dict[int, int] = {}  # by id, the first stage that uses a tensor
        for stage in program.stages:
            for tensor in self._tensors_of(program, stage.index):
                first.setdefault(id(tensor), stage.index)
        self._stages = {name: first.get(id(tensor), 0) for name, tensor in named_tensors(root)}
        for name, index in self._stages.items():
            move_to(root, name, devices[index])
        self._ids: dict[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None}

    def _tensors_of(self, program: Program, stage: int) -> Iterator[torch.Tensor]:
        part = program.stages[stage]
        for name in part.modules:
            module = find_in(self._root, name)
            yield from (*module.parameters(), *module.buffers())
        yield from (find_in(self._root, name) for name in part.attributes)

    def _check_buffers(self, program: Program) -> None:
        calls: dict[int, int] = {}
        for stage in program.stages:
            for name in stage.modules:
                module = find_in(self._root, name)
                first = calls.setdefault(id(module), stage.index)
                if first != stage.index and any(True for _ in module.buffers()):
                    raise ValueError(
                        f"module {name!r} has buffers and is called in stages {first} and {stage.index}: a stage that "
                        "updates them would race with the other"
                    )

    def stage_of(self, tensor: torch.Tensor) -> int:
        """Return the stage on whose device a parameter or buffer is."""
        if self._ids is None:
            self._ids = {id(each): self._stages.get(name, 0) for name, each in named_tensors(self._root)}
        return self._ids.get(id(tensor), 0)

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError if a parameter or buffer is on another device than that of its stage."""
        for tensor in tensors:
            device = self._devices[self.stage_of(tensor)]
            if tensor.device != device:
                name = next(name for name, each in named_tensors(self._root) if each is tensor)
                raise RuntimeError(f"{name} must be on {device}, where its stage runs, but is on {tensor.device}")

    def finders(self, program: Program, shared: list[Crossing] | None) -> list[Callable[[str], Any]]:
        """Return, per stage, the function from a name to its module or tensor, for one call.

        Args:
            shared: gets a crossing for each copy of a parameter that a later stage uses too; ``None``: the copies
                are differentiable, for one graph over all stages.
        """
        if not program.sharers:
            program.sharers = [self._sharers(program, stage) for stage in range(len(self._devices))]
        return [self._finder(names, stage, shared) for stage, names in enumerate(program.sharers)]

    def _sharers(self, program: Program, stage: int) -> list[str]:
        """Return the names of a stage's modules and tensors that use a parameter of another stage."""
        part, found = program.stages[stage], []
        for name in (*part.modules, *part.attributes):
            each = find_in(self._root, name)
            parameters = each.parameters() if isinstance(each, Module) else [each]
            if any(self.stage_of(parameter) != stage for parameter in parameters):
                found.append(name)
        return found

    def _finder(self, names: Sequence[str], stage: int, shared: list[Crossing] | None) -> Callable[[str], Any]:
        device, copies = self._devices[stage], _Copies(self._devices[stage], shared)
        replaced: dict[str, Any] = {}
        for name in names:
            each = find_in(self._root, name)
            if not isinstance(each, Module):
                replaced[name] = copies.of(each)
            elif shared is not None or any(parameter.device != device for parameter in each.parameters()):
                replaced[name] = self._replica(each, stage, copies)
        made = copies.tensors()

        def find(name: str) -> Any:
            if made:
                hand_over(made)
                made.clear()
            return replaced[name] if name in replaced else find_in(self._root, name)

        return find

    def _replica(self, module: Module, stage: int, copies: _Copies) -> Module:
        keep_hooks_apart()
        tree = ModuleTree(module)
        parameters = [each if self.stage_of(each) == stage else copies.of(each) for each in tree.parameters]
        calls = compiled_by_rank(tree, 2)[1] if tree.is_compiled else ()
        replica: Module = build_replica(tree, parameters, tree.buffers, calls)
        return replica


class _Copies:
    """The copies of parameters on one device, each once."""

    def __init__(self, device: torch.device, shared: list[Crossing] | None) -> None:
        self._device, self._shared = device, shared
        self._made: dict[int, torch.Tensor] = {}

    def of(self, parameter: Parameter) -> torch.Tensor:
        key = id(parameter)
        if key not in self._made:
            if self._shared is None:
                self._made[key] = send(parameter, self._device)
            else:
                crossing = Crossing(parameter, self._device)
                self._shared.append(crossing)
                self._made[key] = crossing.leaf
        return self._made[key]

    def tensors(self) -> list[torch.Tensor]:
        return list(self._made.values())
