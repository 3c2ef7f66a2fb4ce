"""Weights of the ranks' losses, with which their sum and its gradient equal those of a single device.

A rank's loss is a mean over its own rows, a sum over them, or a sum with a weight.  The gradient of a mean
is weighted before backward, by the seed that backward starts from, so that it costs no pass over memory; a sum with
weights is divided when all weights are known, after the sums over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.devices.transfer import to_device
from mgpu_core.step.losses import RankLoss, RankPart, number_of

__all__ = [
    "REDUCTIONS",
    "Window",
    "joined_aux",
    "total_of",
    "weighted_mean",
]

REDUCTIONS = ("mean", "sum", "weighted")


def joined_aux(losses: Sequence[RankLoss], rows: Sequence[int], reduction: str) -> dict[str, torch.Tensor]:
    """Return the further numbers of all ranks, each weighed like the loss, on the first rank's device.

    Raises:
        ValueError: ranks gave other names than the first one.
        TypeError: something that is no number.
    """
    names = list(losses[0].aux or ())
    for rank, loss in enumerate(losses):
        if list(loss.aux or ()) != names:
            raise ValueError(f"rank {rank} gave aux numbers named {list(loss.aux or ())}, and rank 0 {names}")
    device = losses[0].value.device
    weights: Sequence[Any] = [_on(device, loss.weight) for loss in losses if loss.weight is not None] or rows
    numbers = {}
    for name in names:
        values = [_aux_number((loss.aux or {})[name], name, device).clone() for loss in losses]  # of the user
        if reduction == "mean":
            numbers[name] = weighted_mean(values, weights, device)
            continue
        numbers[name] = total_of(values)
        if reduction == "weighted":
            numbers[name] = numbers[name] / total_of(weights)
    return numbers


def _aux_number(value: Any, name: str, device: torch.device) -> torch.Tensor:
    if isinstance(value, bool | int | float):
        return torch.full((), float(value), device=device)  # a kernel: the host does not wait
    return to_device(number_of(value, f"the aux number {name}").detach(), device, torch.float32)


def weighted_mean(
    values: Sequence[torch.Tensor], weights: Sequence[float | torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return the mean of one number per rank on ``device``; differentiable.

    A number without weight adds nothing, not even where it is NaN, as a mean over no rows is.

    Args:
        values: tensors without dimensions.
        weights: of each rank.  Numbers that the host knows, such as rows: without any weight the ranks weigh the same.
            If one is a tensor, such as a count of labels on the device, the host waits for none: without any weight
            the mean is NaN.
        device: where the mean is wanted.
    """
    values = list(values)
    for rank, value in enumerate(values):
        if value.device != device:
            values[rank] = to_device(value, device)
    if torch.Tensor in map(type, weights):
        tensors = [_on(device, weight) for weight in weights]
        parts = [(v * w).masked_fill_(w == 0, 0.0) for v, w in zip(values, tensors, strict=True)]
        return total_of(parts) / total_of(tensors)
    numbers: Sequence[Any] = weights
    if not any(numbers):
        return total_of(values, [1.0] * len(values), len(values))
    if 0 in numbers:
        values = [value for value, weight in zip(values, numbers, strict=True) if weight]
        numbers = [weight for weight in numbers if weight]
    return total_of(values, numbers, sum(numbers))


def _on(device: torch.device, weight: torch.Tensor | float) -> torch.Tensor:
    """Return a weight as a tensor without dimensions, in float64 if it is a number of the host."""
    if isinstance(weight, torch.Tensor):
        return to_device(weight, device)
    return torch.full((), weight, dtype=torch.float64, device=device)  # a kernel: the host does not wait


def total_of(values: Sequence[torch.Tensor], factors: Sequence[float] = (), divisor: float = 1.0) -> torch.Tensor:
    """Return the sum of the values, times their factors where there are some; these are divided, and not the sum."""
    factors = factors or [1.0] * len(values)
    first = factors[0] / divisor
    if len(values) == 1:
        return values[0] if first == 1.0 else values[0] * first
    if first == factors[1] / divisor == 1.0:
        return total_of([values[0] + values[1], *values[2:]], [1.0, *factors[2:]])
    summed = values[0] * first
    for value, factor in zip(values[1:], factors[1:], strict=True):
        summed.add_(value, alpha=factor / divisor)
    return summed


class Window:
    """The calls between two updates: one, or as many as are accumulated.

    Args:
        reduction: one of :data:`REDUCTIONS`.
        planned: how many calls the window is expected to have.
        scale: the factor of all losses before backward; gradients are divided by it afterwards.
        seeded: the rows that means are taken over before backward, the same number in all processes; a call without
            rows adds nothing then.  ``None``: there is one process, and it takes those of the first call and plan.

    Attributes:
        calls: how many there were so far.
        weight: of these: their rows, or the weights of their losses.
        is_whole: the window has one call, in one process.
    """

    def __init__(self, reduction: str, planned: int, scale: float = 1.0, seeded: float | None = None) -> None:
        self.calls = 0
        self._planned = planned
        self._reduction, self._scale = reduction, scale
        self.weight: float | torch.Tensor = 0.0
        self._is_shared, self._seeded = seeded is not None, seeded or 0.0
        self.is_whole = planned == 1 and not self._is_shared
        self._elements = self._seeded  # in place of rows, where losses are means over labels
        self._is_weighed = False
        self._call_weight: Any = 0.0  # of the last call

    @property
    def seeds_from(self) -> tuple[float, ...]:
        """The numbers, besides rows, from which :meth:`seed` makes the factors of the next call."""
        return self.is_whole, self._planned, self._seeded, self._elements

    def seed(self, parts: Sequence[RankPart], rows: Sequence[int]) -> None:
        """Set the factor of each part's loss before backward.

        Of a mean over labels it is, besides their weight, a number near that of all targets, ignored ones, too, and one
        that the host knows: a loss scale works as for other means.
        """
        for part, factor in zip(parts, self._seeds(rows), strict=True):
            part.seed = factor
        if self.is_whole and len(parts) == 1:
            return
        elements = 0
        for part in parts:
            if part.target and type(part.target[0]) is torch.Tensor and part.target[0].ndim > 1:
                elements += part.target[0].numel()
        self._elements = self._elements or float(elements * self._planned) or self._seeded or 1.0
        for part in parts:
            part.unit = self._scale / self._elements

    def _seeds(self, rows: Sequence[int]) -> list[float]:
        """Return the factor of each rank's loss before backward; ``rows`` has one entry per rank."""
        if self._reduction != "mean":
            return [self._scale] * len(rows)
        count = sum(rows)
        if self._is_shared and not count:
            return [0.0] * len(rows)
        if not self._seeded:
            self._seeded = float(count * self._planned) or 1.0
        if not count:
            return [self._scale / self._planned / len(rows)] * len(rows)
        return [self._scale * of_rank / self._seeded for of_rank in rows]

    def add(self, rows: Sequence[int], losses: Sequence[RankLoss], device: torch.device) -> torch.Tensor:
        """Count a call that went through; return its loss, as one device would have it, on ``device``."""
        self.calls += 1
        if self._reduction == "mean" and (losses[0].weight is not None or self._is_weighed):
            rows = self._weights_of(losses, device)
        if self._reduction != "weighted":
            weight: Any = sum(rows[1:], rows[0])
            self.weight = weight if self.calls == 1 and type(weight) is torch.Tensor else self.weight + weight
            self._call_weight = weight
        if len(losses) == 1 and self._reduction != "weighted" and losses[0].value.device == device:
            return losses[0].value  # one rank's is the whole
        values: list[torch.Tensor] = []
        for loss in losses:
            values += (loss.value,)
        if self._reduction == "mean":
            return weighted_mean(values, rows, device)
        values = [to_device(value, device) for value in values]
        if self._reduction == "sum":
            return total_of(values)
        weight = total_of([to_device(each.weight, device) for each in losses if isinstance(each.weight, torch.Tensor)])
        self.weight = self.weight + weight if self.calls > 1 else weight
        self._call_weight = weight
        whole: torch.Tensor = total_of(values) / weight
        return whole

    def _weights_of(self, losses: Sequence[RankLoss], device: torch.device) -> list[Any]:
        """Return the weights of means over labels, all on the host, or all on ``device``.

        Raises:
            RuntimeError: losses of calls before had weights, and these have none, or the other way round.
        """
        if losses[0].weight is None or (self.calls > 1 and not self._is_weighed):
            raise RuntimeError(
                "some losses of this update are means over labels, and others are not: what they weigh cannot be told. "
                'Let loss_fn return (sum, weight), and pass reduction="weighted"'
            )
        self._is_weighed, self._seeded = True, self._elements
        weights: list[Any] = []
        for loss in losses:
            weights += (loss.weight,)
        if torch.Tensor in map(type, weights):
            return [_on(device, weight) for weight in weights]
        return weights

    def hook_factor(self) -> float | torch.Tensor:
        """Return the number that makes the sums of the last call the gradient of its loss, in its part of the window.

        The loss scale stays in.
        """
        if not self._is_weighed and self._reduction != "weighted":
            return 1.0
        weight, divisor = self._call_weight, self._elements if self._is_weighed else 1.0
        if isinstance(weight, torch.Tensor):
            return torch.where(weight == 0, 1.0, divisor / (weight * self._planned))
        return divisor / (weight * self._planned) if weight else 1.0

    def factor(self, weight: float | torch.Tensor) -> float | torch.Tensor | None:
        """Return the factor that the sums of the gradients still need; ``None``: no factor.

        A weight of 0 means that no row gave a reason to learn: the gradient is 0, as of a mean over no labels in torch.

        Args:
            weight: of all calls together.
        """
        if type(weight) is not float and isinstance(weight, torch.Tensor):
            divisor = self._seeded if self._reduction == "mean" else 1.0
            return torch.nan_to_num_(divisor / self._scale / weight, nan=math.nan, posinf=0.0)
        factor = 1.0 / self._scale
        if self._reduction == "weighted":
            factor = factor / weight if weight else 0.0
        elif self._reduction == "mean" and weight:
            factor *= self._seeded / weight
        return None if factor == 1.0 else factor
