"""A module for another rank: a deep copy that shares its values with the other ranks of its device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from mgpu_core.device.dtypes import has_gradients
from mgpu_core.module_tree import is_compile_wrapper, modules_of, parameters_of
from mgpu_core.train.inside import Inside, own_attributes
from mgpu_core.train.module_look import HOOKS

__all__ = ["GradientHook", "Twin", "other_hooks", "refuse_hooks"]


class Twin:
    """A deep copy whose parameters share their values with those of another rank of its device.

    Args:
        net: the original.
        home: its device.
        device: where the copy is, with all that the original has at home.
        values: what may be shared: the parameters of a rank there, else the original's, in its order.
        share_buffers: whether buffers are the original's, too.
    """

    def __init__(
        self, net: Module, home: torch.device, device: torch.device, values: Sequence[Parameter], share_buffers: bool
    ) -> None:
        self._net, self._home, self._device, self._share_buffers = net, home, device, share_buffers
        self._values = {id(own): value for own, value in zip(parameters_of(net), values, strict=True)}
        self._memo: dict[int, Any] = {}

    def made(self) -> tuple[Module, list[Parameter]]:
        """The module, and its parameters in the order of the original's."""
        for module in modules_of(self._net):
            self._prepare(module)
        for module in modules_of(self._net):
            for _, value in own_attributes(module):
                Inside(value).prepare_copy(self._memo, self._home, self._device)
        try:
            # What torch.compile(module) wraps takes its wrapper's place: each rank compiles for itself.
            with torch.no_grad():  # or the copies of a script's parameters would have a graph
                for module in modules_of(self._net):
                    if is_compile_wrapper(type(module)):
                        self._memo[id(module)] = copy.deepcopy(module.get_submodule("_orig_mod"), self._memo)
                twin: Module = copy.deepcopy(self._net, self._memo)
        except Exception as error:
            raise TypeError(
                f"{type(self._net).__name__} cannot be copied for a rank of its own ({type(error).__name__}: {error}). "
                "TrainStep needs a module that copy.deepcopy copies; mgpu_core.DataParallel does not"
            ) from error
        own = parameters_of(self._net)
        found = parameters_of(twin)
        for original, copied in zip(own, found, strict=True):
            wanted = self._memo[id(original)]
            if copied is not wanted:  # a script makes its own
                copied.data = wanted.data
                copied.requires_grad_(original.requires_grad)
        return twin, found

    def _prepare(self, module: Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in self._memo:
                self._memo[id(parameter)] = self._parameter(parameter)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in self._memo:
                self._memo[id(buffer)] = buffer if self._share_buffers else self._fresh(buffer)
        for hook in (hook for name in HOOKS for hook in getattr(module, name).values()):
            if not isinstance(getattr(hook, "__self__", hook), Module):  # what collects, collects of all ranks
                self._memo[id(hook)] = hook

    def _parameter(self, parameter: Parameter) -> Parameter:
        values = self._values[id(parameter)].detach().to(self._device)
        made: Parameter = torch.Tensor._make_subclass(type(parameter), values, has_gradients(values.dtype))
        made.__dict__.update(parameter.__dict__)
        for hook in (parameter._backward_hooks or {}).values():  # which a frozen one has, too, but does not take
            made.register_hook(hook)
        made.requires_grad_(parameter.requires_grad)
        return made

    def _fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._device, copy=True)


def refuse_hooks(named: dict[str, Parameter]) -> None:
    """Raises ValueError at a parameter with a post-accumulate hook that is not a step's."""
    for name, parameter in named.items():
        if other_hooks(parameter):
            raise ValueError(
                f"parameter {name} has a post-accumulate hook, which would see the gradient of one rank alone; "
                "remove it before the module is given to TrainStep"
            )


def other_hooks(parameter: Parameter) -> list[int]:
    """The post-accumulate hooks that are not a step's, by number: those of another step do nothing in this one."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return [number for number, hook in hooks.items() if type(hook) is not GradientHook]


class GradientHook:
    """What is called when a parameter of a rank has its gradient; known by its class."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, _: torch.Tensor) -> None:
        self._call()
