"""Advice on the net that a script has trained, from the arguments of its first call."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from mgpu_core.support.progress import Progress
from mgpu_core.tools.advise.benchmark import stopwatch
from mgpu_core.tools.advise.measure import advised
from mgpu_core.tools.advise.plan import plan_of
from mgpu_core.tools.advise.result import Advice
from mgpu_core.tools.advise.watching import Watched
from mgpu_core.trees.nested import tensors_in

__all__ = ["advise_training"]


class _MeanOfOutputs(Module):
    """The net with a stand-in for its loss: the mean of its outputs, which costs next to nothing.

    Args:
        names: of the last arguments, which the net takes by keyword.
        dim: the dimension of the net's rows; those of the arguments are along dimension 0.
    """

    def __init__(self, net: Module, names: tuple[str, ...], dim: int) -> None:
        super().__init__()
        self.net, self.names, self.dim = net, names, dim

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the mean over all floating-point outputs."""
        inputs = tuple(each.movedim(0, self.dim).contiguous() for each in inputs)
        end = len(inputs) - len(self.names)
        outputs = self.net(*inputs[:end], **dict(zip(self.names, inputs[end:], strict=True)))
        return torch.cat([each.float().flatten() for each in tensors_in(outputs) if each.is_floating_point()]).mean()


def advise_training(seen: Watched) -> Advice:
    """Measure one device against many on a net that was seen in training; its loss counts nothing.

    Raises:
        ValueError: an argument of its first call is no tensor.
    """
    args, kwargs = seen.call
    given: dict[str, Any] = {name: each for name, each in kwargs.items() if each is not None}
    net = _MeanOfOutputs(seen.bare_net.train(), tuple(given), seen.dim)
    values = [
        value.movedim(seen.dim, 0) if isinstance(value, torch.Tensor) else value for value in (*args, *given.values())
    ]
    for place, value in zip([*range(len(args)), *given], values, strict=True):
        if not isinstance(value, torch.Tensor) or not value.dim():
            raise ValueError(
                f"argument {place} of {type(seen.bare_net).__name__} is no tensor with rows, but a "
                f"{type(value).__name__}: batches of other sizes cannot be made of it"
            )
    plan = plan_of(net, None, values)
    with Progress("mgpu run --advise") as progress:
        return advised(plan, stopwatch(plan.distinct_devices), progress)
