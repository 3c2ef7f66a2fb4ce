"""The norm of all gradients: for clipping, and to stop an update by numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mgpu_core import kernels
from mgpu_core.device.dtypes import FLOATING
from mgpu_core.engine.gradients import GradientSync
from mgpu_core.engine.replicas import Replicas

__all__ = ["are_finite", "check_finite", "clip", "multiply"]


def _gradient_norm(sync: GradientSync) -> torch.Tensor:
    """The Euclidean norm of the summed gradients, a scalar on the first device."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for flat in sync.every_sum:
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        alike.setdefault((real.device, real.dtype), []).append(real)
    norms = [_norm(tensors) for tensors in alike.values()]
    norms += [_values(each).norm() for each in sync.sparse.values()]
    if len(norms) == 1:
        return norms[0]
    together: torch.Tensor = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).norm()
    return together


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if tensors[0].dtype in FLOATING:
        return kernels.l2_norm(tensors)
    norm: torch.Tensor = torch.nn.utils.get_total_norm(tensors)
    return norm


def clip(sync: GradientSync, limit: float) -> None:
    """Scales all gradients so that their norm is at most ``limit``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    norm = _gradient_norm(sync)
    coefficient = limit / (norm + 1e-6)
    if norm.device.type == "cpu" and coefficient >= 1:
        return  # where nobody waits for the number, nothing need be multiplied by one
    multiply(sync, coefficient.clamp(max=1.0))


def multiply(sync: GradientSync, factor: float | torch.Tensor) -> None:
    """All gradients of all devices, by one number."""
    with torch.no_grad():
        for gradients in sync.parts:
            for each in gradients:
                each.mul_(factor.to(each.device) if isinstance(factor, torch.Tensor) else factor)
        for each in sync.sparse.values():
            each.mul_(factor)


def are_finite(sync: GradientSync) -> bool:
    """Whether no summed gradient is NaN or infinite; waits for the device."""
    # One number that is not finite makes the norm so; a norm that only overflows is looked into for nothing.  Not by a
    # sum of torch's: its threads would be woken, beside those of the ranks.
    if math.isfinite(float(_gradient_norm(sync))):
        return True
    totals = [*sync.every_sum, *map(_values, sync.sparse.values())]
    return all(bool(torch.isfinite(each).all()) for each in totals)


def check_finite(sync: GradientSync, replicas: Replicas, processes: int) -> None:
    """Raises if the sum of so many processes' gradients is NaN or infinite somewhere; waits for the device.

    Raises:
        FloatingPointError: names the rank and the parameter.
    """
    if are_finite(sync):
        return
    for i, name in enumerate(replicas.names):
        for rank in replicas.team.ranks:
            gradient = replicas.parameters[rank][i].grad
            if gradient is not None and not bool(torch.isfinite(_values(gradient)).all()):
                raise FloatingPointError(
                    f"the gradient of {name} is not finite on rank {rank} (device {replicas.team.devices[rank]}); "
                    "nothing was updated. A smaller learning rate, clip_norm or a loss that is safe at 0 may help; "
                    "error_if_nonfinite=False updates all the same"
                )
    if processes > 1:
        raise FloatingPointError(
            f"all gradients are finite in this process, but their sum over {processes} processes is not; nothing was "
            "updated"
        )
    raise FloatingPointError("the ranks' gradients are finite, but their sum is not; nothing was updated")


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()
