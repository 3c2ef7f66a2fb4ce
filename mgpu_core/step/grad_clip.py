"""Summed gradients, and their norm: for clipping, and to stop an update by numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import call
from typing import NoReturn

import torch

from mgpu_core import kernels
from mgpu_core.devices.dtypes import FLOATING
from mgpu_core.devices.transfer import to_device

__all__ = [
    "GradientNorm",
    "Sums",
    "are_finite",
    "clip",
    "factor_of",
    "is_finite",
    "multiply",
    "norm_of",
    "overflow_of",
    "refuse",
    "warm_up",
]


@dataclass(slots=True)
class Sums:
    """Summed gradients: all of a step's, or those of one device.

    Attributes:
        parts: per device the flat sums that it updates by: all of them, or its shards.
        padding: per device, and per flat sum of it, int64 indices between its gradients, where it is always 0.
        every_sum: flat tensors that hold each sum once.
        sparse: the sums of sparse gradients, by parameter.
    """

    parts: list[list[torch.Tensor]] = field(default_factory=list)
    padding: list[list[torch.Tensor]] = field(default_factory=list)
    every_sum: list[torch.Tensor] = field(default_factory=list)
    sparse: dict[int, torch.Tensor] = field(default_factory=dict)

    def on(self, index: int) -> Sums:
        """Return the gradients of one device that has all of them."""
        return Sums([self.parts[index]], [self.padding[index]], self.parts[index])


def norm_of(sums: Sums, *, may_be_sparse: bool) -> kernels.FlatNorm | GradientNorm:
    """Return what computes the norm of these sums: the kernel by itself, where they are all of one kind."""
    kinds = {(each.device, each.dtype) for each in sums.every_sum}
    if len(kinds) == 1 and not may_be_sparse and sums.every_sum[0].dtype in FLOATING:
        return kernels.FlatNorm(sums.every_sum)
    return GradientNorm(sums)


class GradientNorm:
    """The Euclidean norm of the summed gradients.

    Args:
        sums: their memory never changes.
    """

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for flat in sums.every_sum:
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            alike.setdefault((real.device, real.dtype), []).append(real)
        self._norms = [_norm_of(tensors) for tensors in alike.values()]

    def compute(self) -> torch.Tensor:
        """Return the norm of the values that there are now: a scalar on the first device."""
        norms = list(map(call, self._norms))
        if self._sums.sparse:
            norms += [_values(each).norm() for each in self._sums.sparse.values()]
        first, *others = norms
        if not others:
            return first
        together: torch.Tensor = torch.stack([to_device(norm, first.device, torch.float64) for norm in norms]).norm()
        return together


def _norm_of(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    if tensors[0].dtype in FLOATING:
        return kernels.FlatNorm(tensors).compute
    return partial(torch.nn.utils.get_total_norm, tensors)


def clip(sums: Sums, norm: torch.Tensor, limit: float) -> None:
    """Scale all gradients, of norm ``norm``, so that it is at most ``limit``: ``torch.nn.utils.clip_grad_norm_``."""
    coefficient = limit / (norm + 1e-6)
    if norm.device.type == "cpu" and coefficient >= 1:
        return  # the host does not wait for the number, and a factor of one changes nothing
    multiply(sums, coefficient.clamp(max=1.0))


def factor_of(factor: float | torch.Tensor | None, norm: torch.Tensor, limit: float) -> float | torch.Tensor:
    """Return the factor for sums of norm ``norm`` with which ``factor`` times their norm is at most ``limit``.

    A number where the norm is on the CPU, otherwise a float64 scalar on its device, without a wait.
    """
    scale = 1.0 if factor is None else factor
    if isinstance(scale, torch.Tensor):
        scale = to_device(scale, norm.device)
    elif norm.device.type == "cpu":
        length = float(norm) * abs(scale) + 1e-6
        return scale if length <= limit else scale * (limit / length)
    wide = norm.double() * scale
    return (limit / (wide + 1e-6)).clamp(max=1.0) * scale


def multiply(sums: Sums, factor: float | torch.Tensor) -> None:
    """Multiply all gradients of all devices by one number; padding stays zero whatever it is."""
    with torch.no_grad():
        for flats, paddings in zip(sums.parts, sums.padding, strict=True):
            for flat, padding in zip(flats, paddings, strict=True):
                scale = to_device(factor, flat.device) if isinstance(factor, torch.Tensor) else factor
                flat.mul_(scale)
                if not _is_known_finite(scale) and padding.numel():  # it may have become NaN
                    flat.index_fill_(0, padding, 0)
        for grad in sums.sparse.values():
            grad.mul_(factor)


def _is_known_finite(factor: float | torch.Tensor) -> bool:
    """Return whether a number is finite; False where one would have to wait for a device to find out."""
    return (not isinstance(factor, torch.Tensor) or factor.device.type == "cpu") and math.isfinite(float(factor))


def are_finite(sums: Sums) -> bool:
    """Return whether no summed gradient is NaN or infinite; waits for the device.

    For sums whose norm is not finite: one number makes it so; one that only overflows is looked into for nothing.
    """
    return all(map(is_finite, [*sums.every_sum, *sums.sparse.values()]))


def overflow_of(sums: Sums) -> torch.Tensor:
    """1 where a summed gradient in the buckets is NaN or infinite, else 0: :func:`are_finite` for who must not wait."""
    largest = torch.nn.utils.get_total_norm(sums.every_sum, norm_type=math.inf)
    return torch.isfinite(largest).logical_not().float()


def warm_up(sums: Sums) -> None:
    """Launch once, on a sample, all that is done to sums like these between backward and update.

    CUDA loads a kernel at its first launch, which must not be in a capture.  Ordinary steps compute the norm on the
    first device alone and look for overflows in another way, so they do not launch all of it.
    """
    parts = [[torch.ones(8, dtype=flat.dtype, device=flat.device) for flat in flats] for flats in sums.parts]
    sample = Sums(every_sum=parts[0])
    overflow_of(sample)
    norm = GradientNorm(sample).compute()
    clip = torch.ones((), dtype=torch.float64, device=norm.device)
    for factor in (None, 0.5, norm.reciprocal(), norm.double().reciprocal()):
        scale = factor_of(factor, norm, 1.0)
        clip.copy_(scale) if isinstance(scale, torch.Tensor) else clip.fill_(scale)
    clip.copy_(norm.reciprocal())


_NOTHING = (
    "nothing was updated. A smaller learning rate, clip_norm or a loss that is safe at 0 may help; "
    "error_if_nonfinite=False updates all the same"
)


def refuse(
    name: str, losses: Sequence[torch.Tensor | None], devices: Sequence[torch.device], processes: int
) -> NoReturn:
    """Raise, for a summed gradient that is NaN or infinite; waits for the devices.

    Args:
        name: of the parameter.
        losses: of the last call, per rank; ``None`` for one that does not count.  One that is not finite is told.
        devices: per rank of the team.
        processes: how many have added theirs.

    Raises:
        FloatingPointError: names the parameter.
    """
    where = f" after the sum over {processes} processes" if processes > 1 else ""
    if len(devices) == processes == 1:
        where = f" on rank 0 (device {devices[0]})"
    else:
        for rank, loss in enumerate(losses):
            if loss is not None and not is_finite(loss):
                where += f", nor is the loss of rank {rank} (device {devices[rank]})"
                break
    raise FloatingPointError(f"the gradient of {name} is not finite{where}; {_NOTHING}")


def is_finite(gradient: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite; waits for the device."""
    return bool(torch.isfinite(_values(gradient)).all())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()
