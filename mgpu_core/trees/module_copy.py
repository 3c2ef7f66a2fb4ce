"""Copies of a module that live on, for another rank: its parameters keep their class and attributes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from mgpu_core.trees.module_tree import modules_of, parameters_of, wrapped_of
from mgpu_core.trees.replica_hooks import rewire_hooks

__all__ = ["copy_module", "leaf_like", "set_compiled", "give_attributes"]

M = TypeVar("M", bound=Module)

_TABLES = ("_parameters", "_buffers", "_modules")
_DEPTH = 8  # of nests in which saved activations are looked for


def leaf_like(parameter: Parameter, value: torch.Tensor) -> Parameter:
    """Return a Parameter of its own with the memory of ``value``: the same class, attributes and ``requires_grad``."""
    leaf: Parameter = torch.Tensor._make_subclass(type(parameter), value.detach(), parameter.requires_grad)
    give_attributes([parameter], [leaf])
    return leaf


def give_attributes(tensors: Iterable[torch.Tensor], copies: Iterable[torch.Tensor]) -> None:
    """Give each copy of a tensor the attributes that the tensor has now."""
    for tensor, other in zip(tensors, copies, strict=True):
        if other is not tensor and (tensor.__dict__ or other.__dict__):
            other.__dict__ = dict(tensor.__dict__)


def copy_module(net: M, shared: Mapping[int, Any] | None = None) -> M:
    """Return a deep copy of the module, on the same devices.

    Its parameters are leaves with the attributes of the originals, which ``copy.deepcopy`` drops.  Variables of hooks
    that are the module, or in its attributes, are those of the copy.  Tensors with a graph that a forward has left in
    attributes (saved activations, weights of ``weight_norm``) are copied without it.

    Args:
        net: the module.
        shared: what the copy takes in place of objects of the module, by their ids.

    Raises:
        TypeError: an attribute that cannot be copied, such as a lock or an open file; it is named.
    """
    memo = dict(shared or {})
    with torch.no_grad():
        for parameter in parameters_of(net):
            is_usual = type(parameter).__deepcopy__ is Parameter.__deepcopy__ and not is_lazy(parameter)
            if is_usual and id(parameter) not in memo:
                memo[id(parameter)] = leaf_like(parameter, parameter.clone())
        for tensor in _tensors_below([vars(each) for each in modules_of(net)], _DEPTH):
            if tensor.grad_fn is not None and id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
    try:
        copied = copy.deepcopy(net, memo)
        rewire_hooks(copied, memo)
        return copied
    except Exception as error:
        path = _uncopied(net)
        if path is None and (text := wrapped_of(net)) is not None:
            raise TypeError(f"{text}, which cannot be copied: use place() or Pipeline") from error
        if path is None:
            raise
        raise TypeError(
            f"{path} cannot be copied, and each rank needs a copy of its own: {error}. Make it in the forward, or "
            "give its class a __deepcopy__"
        ) from error


def _tensors_below(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict | list | tuple | set):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors_below(entry, depth - 1)


def _uncopied(net: Module) -> str | None:
    """Return the path of the first attribute that cannot be copied."""
    memo = {id(each): each for each in chain(net.modules(), parameters_of(net), net.buffers())}
    for path, module in net.named_modules():
        for name, value in vars(module).items():
            if name not in _TABLES:
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:  # whatever its class says
                    return f"{'.'.join(filter(None, ('net', path, name)))} (a {type(value).__name__})"
    return None


def set_compiled(net: Module, calls: Mapping[str, Sequence[Any]], rank: int) -> None:
    """Let modules of a rank's copy run compiled code: per name the calls of all ranks, which get the module first."""
    for name, of_ranks in calls.items():
        module = net.get_submodule(name)
        module.__dict__["_compiled_call_impl"] = MethodType(of_ranks[rank], module)
