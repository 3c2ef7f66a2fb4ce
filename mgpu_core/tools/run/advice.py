"""Advice on the net that a script has trained, from the arguments of its first call."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from mgpu_core.devices.devices import CPU
from mgpu_core.support.progress import Progress
from mgpu_core.tools.advise.benchmark import stopwatch
from mgpu_core.tools.advise.measure import advised
from mgpu_core.tools.advise.plan import MakeOptimizer, plan_of
from mgpu_core.tools.advise.result import Advice
from mgpu_core.tools.advise.strategies import first_line
from mgpu_core.tools.advise.watching import Watched
from mgpu_core.trees.nested import tensors_in

__all__ = ["advise_training", "remade"]


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


def _like(optimizer: Optimizer, trained: list[Parameter], parameters: list[Parameter]) -> Optimizer:
    """Return an optimizer of the same class and settings for a copy of the net, whose steps change nothing."""
    copies = dict(zip(map(id, trained), parameters, strict=True))
    groups = [
        {**group, "lr": 0.0, "params": [copies[id(each)] for each in group["params"] if id(each) in copies]}
        for group in optimizer.param_groups
    ]
    kind: Any = type(optimizer)
    return cast(Optimizer, kind([group for group in groups if group["params"]]))


def remade(optimizer: Optimizer | None, net: Module) -> tuple[MakeOptimizer | None, str]:
    """Return a function that makes such an optimizer for a copy of the net, and the name of its class.

    ``None``, and the reason instead of the name, where no optimizer made a step, or another of its class cannot.
    """
    if optimizer is None:
        return None, "SGD, since none made a step"
    make = partial(_like, optimizer, list(net.parameters()))
    copies = [Parameter(parameter.detach().clone(), parameter.requires_grad) for parameter in net.parameters()]
    try:
        for parameter in copies:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        make(copies).step()
    except Exception as error:
        return None, f"SGD, since another {type(optimizer).__name__} makes no step: {first_line(error)}"
    return make, type(optimizer).__name__


def advise_training(seen: Watched, optimizer: MakeOptimizer | None = None, ranks: int | None = None) -> Advice:
    """Measure one device against many on a net that was seen in training; its loss counts nothing.

    Args:
        seen: the net; the ranks of its wrapper are measured.
        optimizer: as :func:`remade` returns it.
        ranks: CPU ranks to measure without a wrapper; ``None``: as :func:`mgpu_core.advise` has it.

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
    devices = seen.devices or (None if ranks is None else [CPU] * ranks)
    plan = plan_of(net, None, values, device_ids=devices, optimizer=optimizer)
    with Progress("mgpu run --advise") as progress:
        return advised(plan, stopwatch(plan.distinct_devices), progress)
