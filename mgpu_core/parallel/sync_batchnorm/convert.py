"""Plain layers become synchronised ones."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from mgpu_core.parallel.sync_batchnorm.layer import SyncBatchNorm
from mgpu_core.trees.module_tree import modules_of

__all__ = ["convert_sync_batchnorm"]

M = TypeVar("M", bound=Module)


def convert_sync_batchnorm(module: M) -> M:
    """Replace every BatchNorm1d, 2d and 3d, and torch's SyncBatchNorm, by :class:`SyncBatchNorm`.

    Args:
        module: changed in place; a single layer is returned anew.  Parameters and buffers stay the same objects, so an
            optimizer that was made before still fits.

    Returns:
        The module, or the layer that replaces it.

    Raises:
        TypeError: a layer whose class has a forward of its own, or parametrizations; before anything is changed.
        ValueError: a lazy layer that has not seen an input yet; before anything is changed.
    """
    for layer in modules_of(module):
        if _is_convertible(layer):
            _refuse_special(layer)
    converted: M = _convert(module, {})
    return converted


def _is_convertible(module: Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def _refuse_special(layer: Module) -> None:
    name = type(layer).__name__
    if is_parametrized(layer):
        raise TypeError(f"{name} has parametrizations, which cannot be converted: remove them first")
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(f"{name} does not know its channels yet: run a forward before it is converted")
    if type(layer).forward not in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward) or "forward" in vars(layer):
        raise TypeError(f"{name} has a forward of its own, which would be lost: put a plain BatchNorm layer into it")


def _convert(module: Any, known: dict[int, Module]) -> Any:
    """Convert recursively; ``known`` maps modules to their conversions, so a shared module stays shared."""
    if id(module) in known:
        return known[id(module)]
    if _is_convertible(module):
        known[id(module)] = _converted(module)
        return known[id(module)]
    known[id(module)] = module
    for name, child in list(module._modules.items()):
        if child is not None and (converted := _convert(child, known)) is not child:
            setattr(module, name, converted)
    return module


def _converted(layer: _BatchNorm) -> SyncBatchNorm:
    """Return all that the layer has, the very same: parameters, buffers, hooks, attributes of the user's own."""
    converted = SyncBatchNorm.__new__(SyncBatchNorm)
    converted.__dict__.update(layer.__dict__, _compiled_call_impl=None)
    converted._begin()
    return converted
