"""Hooks of the user's on parameters: called once per call of a step, on the sum over all ranks, as one device would.

Autograd would call them in each rank's backward, on that rank's gradient, where ``g.clamp(-1, 1)`` is another function
than on the sum.  So they are off during the backwards::

    begin: hooks off ── backward of each rank ── sum over ranks ── hooks ── + gradients of the calls before ── hooks on

A parameter without hooks pays nothing; the bucket of one with hooks is summed after the backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from mgpu_core.comm import dispatch
from mgpu_core.devices.transfer import to_device

__all__ = ["ParameterHooks"]


class ParameterHooks:
    """The hooks on the parameters of one call.

    Args:
        rows: the parameters of each rank; the first row is the user's, and has the hooks.

    Attributes:
        indices: the parameters with hooks.
    """

    def __init__(self, rows: Sequence[Sequence[Parameter]]) -> None:
        self._rows = rows
        self.indices = [i for i, each in enumerate(rows[0]) if each._backward_hooks]
        self._hooks: dict[int, Any] = {i: rows[0][i]._backward_hooks for i in self.indices}
        self._before = {i: [row[i].grad for row in rows] for i in self.indices}
        for i in self.indices:
            rows[0][i]._backward_hooks = None
            for row in rows:
                row[i].grad = None

    @torch.no_grad()
    def call(self, factor: float | torch.Tensor) -> None:
        """Call the hooks on the sums, last parameters first, and add what they return to the gradients of before.

        Args:
            factor: makes a sum the gradient of the loss of this call, as one device has it; taken out afterwards.
        """
        for i in reversed(self.indices):
            parts = [row[i].grad for row in self._rows]
            for row in self._rows:
                row[i].grad = None
            total, param = None, self._rows[0][i]
            if any(each is not None for each in parts):
                here = to_device(factor, param.device, param.dtype) if isinstance(factor, torch.Tensor) else factor
                total = dispatch.reduce_batch([parts], "sum", param.device)[0] * here
                for hook in self._hooks[i].values():
                    result = hook(total)
                    total = total if result is None else result
                total = total / here
            kept, *others = self._before[i]
            for row, gradient in zip(self._rows[1:], others, strict=True):
                row[i].grad = gradient
            param.grad = total if kept is None else kept if total is None else kept + total

    def give_back(self) -> None:
        """Put the hooks back, next to those that a forward has registered meanwhile."""
        for i, hooks in self._hooks.items():
            param = self._rows[0][i]
            meanwhile = param._backward_hooks
            param._backward_hooks = hooks
            for hook in (meanwhile or {}).values():
                param.register_hook(hook)
        self._hooks = {}
