"""Which device has which parameter and buffer; and the copies of those that several stages use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.devices.transfer import hand_over, to_device
from mgpu_core.parallel.replicate_modules import build_replica, compiled_by_rank
from mgpu_core.pipeline.borders import Crossing, send
from mgpu_core.pipeline.graph import Program
from mgpu_core.trees.module_tree import ModuleTree, check_initialised, named_parameters_of
from mgpu_core.trees.replica_hooks import keep_hooks_apart

__all__ = ["MOVES", "Placement", "find_in", "is_spread", "move_to", "named_tensors", "refuse_moves"]

MOVES = ("to", "to_empty", "cpu", "cuda", "ipu", "mtia", "xpu", torch._C._get_privateuse1_backend_name())
"""The methods of a module that would bring it to one device; the last is of a plug-in for torch."""


def find_in(root: Module, name: str) -> Any:
    """Return the module or tensor of a dotted name; the root itself for an empty one."""
    return attrgetter(name)(root) if name else root


def move_to(module: Module, name: str, device: torch.device) -> None:
    """Move a tensor of the module to a device in place: a Parameter stays the same object, and keeps its gradient."""
    owner, _, last = name.rpartition(".")
    tables = find_in(module, owner)
    parameter = tables._parameters.get(last)
    if parameter is None:
        tables._buffers[last] = to_device(tables._buffers[last], device)
        return
    parameter.data = to_device(parameter.data, device)
    if parameter.grad is not None:
        parameter.grad.data = to_device(parameter.grad.data, device)


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
        first: dict[int, int] = {}  # by id, the first stage that uses a module or tensor
        for index, stage in enumerate(program.stages):
            for name in (*stage.modules, *stage.attributes):
                used = find_in(root, name)
                buffers = list(used.buffers()) if isinstance(used, Module) else []
                if first.setdefault(id(used), index) != index and buffers:
                    raise ValueError(
                        f"module {name!r} has buffers and is called in stages {first[id(used)]} and {index}: a stage "
                        "that updates them would race with the other"
                    )
                for tensor in (*_parameters_of(used), *buffers):
                    first.setdefault(id(tensor), index)
        self._stages = {name: first.get(id(tensor), 0) for name, tensor in named_tensors(root)}
        for name, index in self._stages.items():
            move_to(root, name, devices[index])
        self._ids: dict[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None}

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
            for index, stage in enumerate(program.stages):
                used = {name: _parameters_of(find_in(self._root, name)) for name in (*stage.modules, *stage.attributes)}
                program.sharers.append([name for name in used if any(self.stage_of(p) != index for p in used[name])])
        return [self._finder(names, stage, shared) for stage, names in enumerate(program.sharers)]

    def _finder(self, names: Sequence[str], stage: int, shared: list[Crossing] | None) -> Callable[[str], Any]:
        device = self._devices[stage]
        copies: dict[int, torch.Tensor] = {}  # by id of the parameter

        def copied(parameter: torch.Tensor) -> torch.Tensor:
            if id(parameter) not in copies:
                copies[id(parameter)] = send(parameter, device, shared)
            return copies[id(parameter)]

        replaced: dict[str, Any] = {}
        for name in names:
            used = find_in(self._root, name)
            if not isinstance(used, Module):
                replaced[name] = copied(used)
            elif shared is not None or any(parameter.device != device for parameter in used.parameters()):
                keep_hooks_apart()
                tree = ModuleTree(used)
                parameters = [each if self.stage_of(each) == stage else copied(each) for each in tree.parameters]
                calls = compiled_by_rank(tree, 2)[1] if tree.is_compiled else ()
                replaced[name] = build_replica(tree, parameters, tree.buffers, calls)

        def find(name: str) -> Any:
            if copies:
                hand_over(list(copies.values()))
                copies.clear()
            return replaced[name] if name in replaced else find_in(self._root, name)

        return find


def _parameters_of(used: Any) -> list[torch.Tensor]:
    """Return the parameters of a module, or the tensor itself."""
    return list(used.parameters()) if isinstance(used, Module) else [used]
