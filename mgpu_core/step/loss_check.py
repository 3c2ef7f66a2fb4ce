"""Find out whether a loss couples rows: whether the ranks' losses add up to the loss of all rows.

InfoNCE, a Dice loss or an advantage that is normalised inside the loss compare rows with each other.  Computed per rank
they are another loss than on one device, which no weights can correct: ``loss_on="gathered"`` computes them once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from mgpu_core.devices.plug_ins import numbers_of
from mgpu_core.parallel.first_calls import Call, Observer
from mgpu_core.parallel.scatter_inputs.cut import Arguments
from mgpu_core.ranks.random import random_numbers_kept
from mgpu_core.step.joined_outputs import UnjoinedError, joined_plainly
from mgpu_core.step.losses import Losses, RankLoss, rank_loss
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.comparison import any_in_half, tolerance
from mgpu_core.trees.marks import changed, held_by, marks_of
from mgpu_core.trees.nested import flatten, moved, tensors_in

__all__ = ["LossCheck", "LossState", "compare_losses", "warning_of", "warning_of_side", "warning_of_state"]

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


class LossState(Observer):
    """The objects that a loss function holds, as a call changes them.

    It observes losses on gathered outputs, which must not read objects that the forwards change.

    Args:
        loss_fn: a function, a module, or another callable object.

    Attributes:
        side: the names of those that were changed before the first loss: by the forwards, hooks on layers for example.
        own: the names of those that the first loss itself has changed.
    """

    def __init__(self, loss_fn: Any) -> None:
        self._loss_fn = loss_fn
        self._marks: dict[str, Any] = {}
        self.side: list[str] = []
        self.own: list[str] = []

    def _now(self) -> dict[str, Any]:
        return marks_of(held_by(self._loss_fn))

    def begin(self, _call: Call | None = None) -> None:
        self._marks, self.side, self.own = self._now(), [], []

    def end(self, call: Call) -> bool:
        if len(call.rows) < 2 or not self.side:
            return False
        warn_user(warning_of_side(self, gathers=True))
        return True

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """Note the objects that were changed before the first loss, and those that it changes."""
        before, self._marks = self._marks, self._now()
        self.side = changed(before, self._marks)
        try:
            yield
            self.own = [name for name in changed(self._marks, self._now()) if name not in self.side]
        finally:
            self._marks = {}  # they hold the objects


def compare_losses(
    loss_fn: Callable[..., Any],
    outputs: Sequence[Any],
    target: Any,
    losses: Sequence[RankLoss],
    rows: Sequence[int],
    reduction: str,
    calls: Losses,
    *,
    dim: int,
    is_half: bool,
) -> LossCheck:
    """Compare the loss of all outputs together with the sum of the ranks' losses.

    Args:
        loss_fn: the user's, without a state of its own; it is called without gradients, as a rule once, and the random
            numbers are put back afterwards.
        outputs: of each rank, without a graph.
        target: of all rows, on the first rank's device.
        losses, rows: of each rank.
        reduction: of the step.
        calls: the loss function, and weighs its result.
        dim: the dimension of the rows.
        is_half: whether forwards compute in half precision.
    """
    leaves: list[Any] = []
    flatten(list(outputs), leaves, "outputs", whole=True)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    if not sum(rows):
        return LossCheck(None, reason="the batch has no rows")
    nbytes = sum(each.nbytes for each in tensors)
    if nbytes > LARGEST_NBYTES:
        try:
            with torch.no_grad(), random_numbers_kept(each.device for each in tensors):
                outputs, target, losses, rows = _first_rows(
                    loss_fn, outputs, target, rows, reduction, calls, LARGEST_NBYTES / nbytes, dim
                )
        except Exception as error:
            return LossCheck(None, reason=f"the loss of some rows failed ({type(error).__name__}: {error})")
    ranks, size = _sum_of(losses, rows, reduction)
    allowed = tolerance(half=is_half or any_in_half(tensors)) * size
    devices = [each.device for each in tensors]
    try:
        with torch.no_grad(), random_numbers_kept(devices):
            numbers = torch.get_rng_state(), numbers_of(devices)
            gathered = _gathered(loss_fn, joined_plainly(outputs, rows, dim), target, reduction)
            if abs(gathered - ranks) > allowed and not all(each.dim() for each in tensors):
                # A number that a forward returns may be a sum over its rows, and not their mean.
                other = _gathered(loss_fn, joined_plainly(outputs, rows, dim, adds=True), target, reduction)
                gathered = other if abs(other - ranks) <= allowed else gathered
            draws = not torch.equal(numbers[0], torch.get_rng_state()) or any(
                not torch.equal(now, numbers[1][device]) for device, now in numbers_of(devices).items()
            )
    except UnjoinedError as error:
        return LossCheck(None, reason=f"the ranks' outputs cannot be joined as one device would have them: {error}")
    except Exception as error:
        return LossCheck(None, reason=f"the loss of all outputs together failed ({type(error).__name__}: {error})")
    if draws or not math.isfinite(gathered):
        return LossCheck(None, reason="the loss draws random numbers, or is not finite")
    agrees = abs(gathered - ranks) <= allowed  # not where a rank's loss is NaN: a mean over no labels, for example
    return LossCheck(agrees, ranks, gathered, "" if agrees else _ADVICE)


def _first_rows(
    loss_fn: Callable[..., Any],
    outputs: Sequence[Any],
    target: Any,
    rows: Sequence[int],
    reduction: str,
    calls: Losses,
    share: float,
    dim: int,
) -> tuple[list[Any], Any, list[RankLoss], list[int]]:
    """Return outputs, target, losses and rows as if each rank had its first rows alone, ``share`` of them."""
    kept = [min(count, max(1, int(count * share))) for count in rows]
    counts = [[count, total - count] for count, total in zip(kept, rows, strict=True)]
    heads = [
        Arguments({"outputs": nest}, share=False).slices(its, dim) for nest, its in zip(outputs, counts, strict=True)
    ]
    fewer = [output for ((output,), _) in heads]
    pieces = Arguments({"target": target}, share=False).slices(list(chain.from_iterable(counts)), dim)
    targets = [part for (part,) in islice(pieces, 0, None, 2)]
    losses = []
    for output, its in zip(fewer, targets, strict=True):
        result, weight = calls.call(loss_fn, output, moved(its, tensors_in(output)[0].device))
        losses.append(rank_loss(result, reduction))
        losses[-1].weight = losses[-1].weight if weight is None else weight
    return fewer, joined_plainly(targets, kept, dim), losses, kept


_ADVICE = (
    'it compares rows of different ranks: loss_on="gathered" computes it once, as on one device; or it divides by '
    'another number than that of its rows: reduction="weighted"'
)


def _gathered(loss_fn: Callable[..., Any], outputs: Any, target: Any, reduction: str) -> float:
    loss = rank_loss(loss_fn(outputs, target), reduction)
    return float(loss.value if loss.weight is None else loss.value / loss.weight)


def _sum_of(losses: Sequence[RankLoss], rows: Sequence[int], reduction: str) -> tuple[float, float]:
    """Return the sum of the ranks' losses, and of their absolute values."""
    values = [float(each.value) for each in losses]
    if reduction == "mean":
        counts = [
            count if loss.weight is None else float(loss.weight) for loss, count in zip(losses, rows, strict=True)
        ]
        total = sum(counts) or math.nan
        values = [value * count / total for value, count in zip(values, counts, strict=True) if count]
    if reduction == "weighted":
        weight = sum(float(each.weight) for each in losses if each.weight is not None)
        values = [value / weight if weight else math.nan for value in values]
    return sum(values), sum(map(abs, values))


def warning_of_state(state: LossState, ranks: int) -> str:
    """Return the advice for a loss that has changed its objects."""
    return (
        f"the loss keeps a state of its own ({', '.join(state.own)}): it is called once per rank, {ranks} times a "
        'step, where one device calls it once. loss_on="gathered" calls it once, on the outputs of all ranks'
    )


def warning_of_side(state: LossState, *, gathers: bool) -> str:
    """Return the advice for a loss that reads objects which forwards have changed."""
    names = ", ".join(state.side)
    if gathers:
        return (
            f"the loss reads {names}, which the forward of each rank changes: computed once, on the outputs of all "
            'ranks, it reads what the last rank has left. Return it from the forward, or use loss_on="ranks"'
        )
    return (
        f"the loss reads {names}, which other ranks change meanwhile, in their forwards or losses: in threads, a rank "
        "may read what another has left. Return it from the forward, or run the ranks one after the other, with "
        'workers="caller"; a state of the loss itself needs loss_on="gathered"'
    )


def warning_of(check: LossCheck) -> str:
    """Return the advice where the numbers differ."""
    return (
        f"the loss of all rows together is {check.gathered:.6g}, but the ranks' losses add up to {check.ranks:.6g}: "
        f"{check.reason}"
    )
