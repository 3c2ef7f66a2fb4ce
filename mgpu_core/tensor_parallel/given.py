"""The module that a TensorParallel was given: it keeps layers, modes, hooks and attributes, and has no memory.

Each call makes the ranks' views of it, so all ranks see changes that are made there.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.nn import Module, Parameter

__all__ = ["empty", "refuse_calls", "refuse_hooks"]


class _CutParameter(Parameter):
    """A Parameter of a module that was cut: it has no memory, no optimizer may step it, and its parts can be frozen."""

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        """Raise RuntimeError: the optimizer would do nothing."""
        raise RuntimeError("this Parameter's module was cut by TensorParallel: make the optimizer of tp.parameters()")

    @property
    def requires_grad(self) -> bool:
        """That of its parts."""
        return self._parts()[0].requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        for part in self._parts():
            part.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> _CutParameter:
        """Freeze or train its parts."""
        self.requires_grad = requires_grad
        return self

    def _parts(self) -> list[Parameter]:
        parts = [part_ref() for part_ref in self.__dict__["_part_refs"]]
        if None in parts:
            raise RuntimeError("this Parameter's module was cut by a TensorParallel that is gone")
        return parts


def empty(net: Module, parts: Mapping[int, Sequence[Parameter]]) -> None:
    """Put the Parameters of a module on meta, and let its forward and its optimizers say so.

    Args:
        net: the module.
        parts: of each Parameter, by its id.
    """
    for whole in list(net.parameters()):
        hollow = torch.Tensor._make_subclass(_CutParameter, torch.empty_like(whole, device="meta"), whole.requires_grad)
        hollow.__dict__.update(whole.__dict__, _part_refs=list(map(weakref.ref, parts[id(whole)])))
        whole.grad = None
        torch.utils.swap_tensors(whole, hollow)
    net.__dict__["forward"] = refuse_calls


def refuse_calls(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise RuntimeError, in place of the module's forward."""
    raise RuntimeError("this module was cut by TensorParallel, and has no weights of its own: call the TensorParallel")


def refuse_hooks(net: Module) -> None:
    """Raise ValueError for hooks on Parameters, of which the parts would know nothing."""
    for name, parameter in net.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"{name} has a hook, which its parts would not have: register it on tp.parameters()")
