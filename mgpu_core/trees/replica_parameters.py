"""Parameters of replicas: copies with a graph to the module's own, which a forward may treat as parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Parameter

from mgpu_core.trees.module_copy import give_attributes

__all__ = ["ReplicaParameter", "as_parameters", "follow_attributes"]

_attributes_of = attrgetter("__dict__")
_version_kept: Any = torch.autograd.__dict__["_unsafe_preserve_version_counter"]
_has_grad: Any = torch.Tensor.requires_grad  # torch's own property


class ReplicaParameter(Parameter):
    """A copy of a parameter, in the graph of the forward: no leaf, but an instance of ``torch.nn.Parameter``.

    ``requires_grad`` may be set in a forward, as for a leaf: False takes the copy out of the graph, True puts it back.
    """

    @property
    def requires_grad(self) -> bool:
        """Return whether the operations on it are recorded."""
        return bool(_has_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ReplicaParameter:
        """Take the copy out of the graph, or put it back."""
        if requires_grad == self.requires_grad:
            return self
        if not requires_grad:
            if self.grad_fn is not None:
                with torch.enable_grad():
                    self.__dict__["_in_graph"] = _Alias.apply(self)
            self.detach_()
            return self
        in_graph = self.__dict__.pop("_in_graph", None)
        if in_graph is None:
            torch.Tensor.requires_grad_(self)
        else:  # its values are as they were: what was saved for backward stays valid
            with torch.enable_grad(), _version_kept(self):
                _Attach.apply(self, in_graph)
        return self


class _Alias(torch.autograd.Function):
    """A tensor with the graph of another one."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().as_subclass(torch.Tensor).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Attach(torch.autograd.Function):
    """Give the first tensor, in place, the graph of the second."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, in_graph: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


_classes: dict[type, type] = {Parameter: ReplicaParameter}


def as_parameters(originals: Sequence[Parameter], rows: Iterable[Sequence[torch.Tensor]]) -> None:
    """Make the plain tensors of ranks :class:`ReplicaParameter`, and of their originals' own class of parameters."""
    for row in rows:
        for original, copy in zip(originals, row, strict=True):
            if type(copy) is torch.Tensor:
                kind = type(original)
                copy.__class__ = _classes[kind] if kind in _classes else _class_for(kind)


def _class_for(kind: type) -> type:
    is_replicas = issubclass(kind, ReplicaParameter)  # of a replica that is replicated again
    replica_class = _classes[kind] = kind if is_replicas else type(kind.__name__, (ReplicaParameter, kind), {})
    return replica_class


def follow_attributes(originals: Sequence[torch.Tensor], rows: Iterable[Sequence[torch.Tensor]]) -> None:
    """Give the copies of each rank the attributes that the originals have now, such as a mask or a scale."""
    if any(map(_attributes_of, originals)):
        for row in rows:
            give_attributes(originals, row)
