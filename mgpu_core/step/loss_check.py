"""Find out whether a loss couples rows: whether the ranks' losses add up to the loss of all rows.

InfoNCE, a Dice loss or an advantage that is normalised inside the loss compare rows with each other.  Computed per rank
they are another loss than on one device, which no weights can correct: ``loss_on="gathered"`` computes them once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from mgpu_core.ranks.random import random_numbers_kept
from mgpu_core.step.joined_outputs import UnjoinedError, joined_plainly
from mgpu_core.step.loss import RankLoss, rank_loss
from mgpu_core.trees.comparison import any_in_half, tolerance
from mgpu_core.trees.nested import flatten

__all__ = ["LossCheck", "LossState", "compare_losses", "warning_of"]

LARGEST_NBYTES = 64 * 2**20  # of outputs that are looked at


class LossCheck(NamedTuple):
    """The result of a check of the loss.

    Attributes:
        agrees: whether the two numbers are equal up to rounding; ``None``: that could not be judged.
        ranks: the sum of the ranks' losses, each with its weight.
        gathered: the loss of the outputs of all ranks together.
        reason: why the loss could not be judged, or advice where the numbers differ; otherwise empty.
    """

    agrees: bool | None
    ranks: float | None = None
    gathered: float | None = None
    reason: str = ""


class LossState:
    """The buffers of a loss module as they are now, to compute from them again.

    Args:
        loss_fn: a function has none.
    """

    def __init__(self, loss_fn: Any) -> None:
        buffers = list(loss_fn.buffers()) if isinstance(loss_fn, Module) else []
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]

    def restore(self) -> None:
        """Write the values back."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)


def compare_losses(
    loss_fn: Callable[..., Any],
    outputs: Sequence[Any],
    target: Any,
    losses: Sequence[RankLoss],
    rows: Sequence[int],
    reduction: str,
    before: LossState,
    *,
    dim: int,
    is_half: bool,
) -> LossCheck:
    """Compare the loss of all outputs together with the sum of the ranks' losses.

    Args:
        loss_fn: the user's; it is called twice without gradients, from the state ``before``.  Its buffers and the
            random numbers are put back afterwards.
        outputs: of each rank, without a graph.
        target: of all rows, on the first rank's device.
        losses, rows: of each rank.
        reduction: of the step.
        before: the state that the ranks began with.
        dim: the dimension of the rows.
        is_half: whether forwards compute in half precision.
    """
    leaves: list[Any] = []
    flatten(list(outputs), leaves, "outputs", whole=True)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    if sum(each.nbytes for each in tensors) > LARGEST_NBYTES:
        return LossCheck(None, reason=f"the outputs are larger than {LARGEST_NBYTES >> 20} MiB")
    if not sum(rows):
        return LossCheck(None, reason="the batch has no rows")
    ranks, size = _sum_of(losses, rows, reduction)
    allowed = tolerance(half=is_half or any_in_half(tensors)) * size
    after = LossState(loss_fn)
    try:
        with torch.no_grad(), random_numbers_kept(each.device for each in tensors):
            whole = joined_plainly(outputs, rows, dim)
            found = [_gathered(loss_fn, whole, target, reduction, before) for _ in range(2)]
            if abs(found[0] - ranks) > allowed and not all(each.dim() for each in tensors):
                # A number that a forward returns may be a sum over its rows, and not their mean.
                whole = joined_plainly(outputs, rows, dim, adds=True)
                other = [_gathered(loss_fn, whole, target, reduction, before) for _ in range(2)]
                found = other if abs(other[0] - ranks) <= allowed else found
    except UnjoinedError as error:
        return LossCheck(None, reason=f"the ranks' outputs cannot be joined as one device would have them: {error}")
    except Exception as error:
        return LossCheck(None, reason=f"the loss of all outputs together failed ({type(error).__name__}: {error})")
    finally:
        after.restore()
    if found[0] != found[1] or not math.isfinite(found[0]) or not math.isfinite(ranks):
        return LossCheck(None, reason="the loss draws random numbers, keeps a state of its own, or is not finite")
    agrees = abs(found[0] - ranks) <= allowed
    return LossCheck(agrees, ranks, found[0], "" if agrees else _advice(loss_fn, target, reduction))


def _gathered(loss_fn: Callable[..., Any], outputs: Any, target: Any, reduction: str, before: LossState) -> float:
    """Compute the loss from the state before; each time with other random numbers."""
    before.restore()
    torch.rand(1)
    loss = rank_loss(loss_fn(outputs, target), reduction)
    return float(loss.value if loss.weight is None else loss.value / loss.weight)


def _sum_of(losses: Sequence[RankLoss], rows: Sequence[int], reduction: str) -> tuple[float, float]:
    """Return the sum of the ranks' losses, and of their absolute values."""
    values = [float(each.value) for each in losses]
    if reduction == "mean":
        values = [value * count / sum(rows) for value, count in zip(values, rows, strict=True)]
    if reduction == "weighted":
        weight = sum(float(each.weight) for each in losses if each.weight is not None)
        values = [value / weight if weight else math.nan for value in values]
    return sum(values), sum(map(abs, values))


def _advice(loss_fn: Any, target: Any, reduction: str) -> str:
    if reduction == "mean" and _is_weighted_mean(loss_fn, target):
        return (
            "a mean with class weights or ignore_index is divided by other numbers on each rank: let loss_fn return "
            '(sum, weight), and pass reduction="weighted"'
        )
    return (
        'it compares rows of different ranks: loss_on="gathered" computes it once, as on one device; or it divides by '
        'another number than that of its rows: reduction="weighted"'
    )


def _is_weighted_mean(loss_fn: Any, target: Any) -> bool:
    if getattr(loss_fn, "weight", None) is not None:
        return True
    ignored = getattr(loss_fn, "ignore_index", -100)
    is_classes = isinstance(target, torch.Tensor) and not target.is_floating_point() and not target.is_complex()
    return is_classes and bool((target == ignored).any())


def warning_of(check: LossCheck) -> str:
    """Return the advice where the numbers differ."""
    return (
        f"the loss of all rows together is {check.gathered:.6g}, but the ranks' losses add up to {check.ranks:.6g}: "
        f"{check.reason}"
    )
