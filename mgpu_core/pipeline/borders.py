"""Values that cross the border from one stage to another: differentiable copies, and copies that end a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.devices.streams import caller_streams, resumed_on_all
from mgpu_core.devices.transfer import copy_aside, hand_over
from mgpu_core.support.null_context import NULL_CONTEXT

__all__ = ["Crossing", "send"]


class _Send(torch.autograd.Function):
    """A copy on another device; its gradient is a copy back.  Its own adjoint, so double backward works."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device, streams: Sequence[torch.Stream | None]) -> Any:
        ctx.devices, ctx.streams = (tensor.device, device), streams
        return copy_aside(tensor, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        is_on_cpu = all(stream is None for stream in ctx.streams)
        with NULL_CONTEXT if is_on_cpu else resumed_on_all(ctx.devices, ctx.streams):
            back: torch.Tensor = _Send.apply(grad, ctx.devices[0], ctx.streams[::-1])
            hand_over([back])
        return back, None, None


class _Handed(torch.autograd.Function):
    """A leaf in the hands of a module, which may write it in place, as it could not write the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()  # the same memory, and the same count of writes

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Crossing:
    """A tensor and its copy in another stage, a leaf of another graph; the gradient of the copy is the tensor's.

    Attributes:
        source: the tensor, or a parameter.
        leaf: the copy.
        grad: its gradient on the device of ``source``, once :meth:`send_back` was called; ``None``: it has none.
    """

    __slots__ = ("grad", "leaf", "source")

    def __init__(self, source: torch.Tensor, device: torch.device) -> None:
        self.source = source
        self.leaf = copy_aside(source.detach(), device).requires_grad_()
        self.grad: torch.Tensor | None = None

    def handed(self, copied: torch.Event | None = None) -> torch.Tensor:
        """Return the copy for the stage to compute with, after this event, or all copies to its device."""
        hand_over([self.leaf], copied)
        given: torch.Tensor = _Handed.apply(self.leaf)
        return given

    def send_back(self) -> None:
        """Start the copy of the gradient to the device of the source, and let go of the copy."""
        grad = self.leaf.grad
        self.grad = None if grad is None else copy_aside(grad, self.source.device)
        del self.leaf


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on ``device``, by a differentiable copy; call ``hand_over`` on it before computing with it."""
    if tensor.device == device:
        return tensor
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return copy_aside(tensor, device)
    copy: torch.Tensor = _Send.apply(tensor, device, caller_streams((tensor.device, device)))
    return copy
