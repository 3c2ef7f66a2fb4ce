"""The norm of all gradients: for clipping, and to stop an update by numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from mgpu_core import kernels
from mgpu_core.device.dtypes import FLOATING
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.sums import Sums

__all__ = ["GradientNorm", "are_finite", "check_finite", "clip", "factor_of", "multiply", "overflow_of", "warm_up"]


class GradientNorm:
    """The Euclidean norm of the summed gradients, a scalar on their first device.

    Args:
        sums: that lie where they will always lie.
    """

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for flat in sums.every_sum:
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            alike.setdefault((real.device, real.dtype), []).append(real)
        self._norms = [_norm_of(tensors) for tensors in alike.values()]

    def compute(self) -> torch.Tensor:
        """Of the sums that there are now."""
        norms = [compute() for compute in self._norms]
        norms += [_values(each).norm() for each in self._sums.sparse.values()]
        if len(norms) == 1:
            return norms[0]
        together: torch.Tensor = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).norm()
        return together


def _norm_of(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    if tensors[0].dtype in FLOATING:
        return kernels.FlatNorm(tensors).compute
    return partial(torch.nn.utils.get_total_norm, tensors)


def clip(sums: Sums, norm: torch.Tensor, limit: float) -> None:
    """Scales all gradients, of norm ``norm``, so that it is at most ``limit``: ``torch.nn.utils.clip_grad_norm_``."""
    coefficient = limit / (norm + 1e-6)
    if norm.device.type == "cpu" and coefficient >= 1:
        return  # where nobody waits for the number, nothing need be multiplied by one
    multiply(sums, coefficient.clamp(max=1.0))


def factor_of(factor: float | torch.Tensor | None, norm: torch.Tensor, limit: float) -> float | torch.Tensor:
    """Return what the sums, of norm ``norm``, are multiplied by so that ``factor`` times them is at most ``limit``.

    A number where the norm lies on the CPU, else a float64 scalar beside it: nobody waits.
    """
    if norm.device.type == "cpu" and not isinstance(factor, torch.Tensor):
        known = 1.0 if factor is None else factor
        length = float(norm) * abs(known) + 1e-6
        return known * min(1.0, limit / length) if length > 0 else math.nan
    scale = 1.0 if factor is None else factor if not isinstance(factor, torch.Tensor) else factor.to(norm.device)
    wide = norm.double() * scale
    return (limit / (wide + 1e-6)).clamp(max=1.0) * scale


def multiply(sums: Sums, factor: float | torch.Tensor) -> None:
    """All gradients of all devices, by one number; padding stays zero whatever it is."""
    with torch.no_grad():
        for flats, paddings in zip(sums.parts, sums.padding, strict=True):
            for flat, padding in zip(flats, paddings, strict=True):
                own = factor.to(flat.device) if isinstance(factor, torch.Tensor) else factor
                flat.mul_(own)
                if not _is_known_finite(own) and padding.numel():  # it may have become NaN
                    flat.index_fill_(0, padding, 0)
        for each in sums.sparse.values():
            each.mul_(factor)


def _is_known_finite(factor: float | torch.Tensor) -> bool:
    """Nobody waits for a device to find out."""
    return (not isinstance(factor, torch.Tensor) or factor.device.type == "cpu") and math.isfinite(float(factor))


def are_finite(sums: Sums, norm: torch.Tensor) -> bool:
    """Whether no summed gradient, all together of norm ``norm``, is NaN or infinite; waits for the device."""
    # One number that is not finite makes the norm so; a norm that only overflows is looked into for nothing.  Not by a
    # sum of torch's: its threads would be woken, beside those of the ranks.
    if math.isfinite(float(norm)):
        return True
    totals = [*sums.every_sum, *map(_values, sums.sparse.values())]
    return all(bool(torch.isfinite(each).all()) for each in totals)


def overflow_of(sums: Sums) -> torch.Tensor:
    """1 where a summed gradient in the buckets is NaN or infinite, else 0: :func:`are_finite` for who must not wait."""
    largest = torch.nn.utils.get_total_norm(sums.every_sum, norm_type=math.inf)
    return torch.isfinite(largest).logical_not().float()


def warm_up(sums: Sums) -> None:
    """Launch once, on a sample, all that is done to sums like these between backward and update.

    CUDA loads a kernel at its first launch, which must not be in a capture.  Ordinary steps compute the norm on the
    first device alone and look for overflows in another way, so they do not launch all of it.
    """
    sample = sums.sample()
    overflow_of(sample)
    norm = GradientNorm(sample).compute()
    clip = torch.ones((), dtype=torch.float64, device=norm.device)
    for factor in (None, 0.5, norm.reciprocal(), norm.double().reciprocal()):
        found = factor_of(factor, norm, 1.0)
        clip.copy_(found) if isinstance(found, torch.Tensor) else clip.fill_(found)
    clip.copy_(norm.reciprocal())


def check_finite(sums: Sums, norm: torch.Tensor, replicas: Replicas, processes: int) -> None:
    """Raises if the sum of so many processes' gradients is NaN or infinite somewhere; waits for the device.

    Args:
        sums: all of them.
        norm: theirs.
        replicas: the ranks, whose own gradients are looked into then.
        processes: how many have added theirs.

    Raises:
        FloatingPointError: names the rank and the parameter.
    """
    if are_finite(sums, norm):
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
