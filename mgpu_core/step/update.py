"""From one update to the next: the calls whose gradients it is made of, the optimizer's step, and the counts after it::

    begin ── calls of the window ── commit: finish the sums ── factor ── show ── optimizer ── count
      └──────────── after a failure: restore ────────────┘

Parameters, optimizer state and counts do not change before the optimizer's step.  Running statistics do, and are
restored when the window is abandoned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch.optim import Optimizer

from mgpu_core.devices.memory import note_written
from mgpu_core.devices.transfer import to_device
from mgpu_core.step.grad_buckets import Communication
from mgpu_core.step.grad_clip import are_finite, clip, factor_of, multiply, refuse
from mgpu_core.step.grad_scaler import LossScale
from mgpu_core.step.losses import RankLoss
from mgpu_core.step.optimizer_step import LeftOverStep, OptimizerStep
from mgpu_core.step.options import Options
from mgpu_core.step.ranks import Ranks
from mgpu_core.step.reducer import Gradients
from mgpu_core.step.rollback import uninterrupted
from mgpu_core.step.window import Window
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer
from mgpu_core.trace.events import ALL_RANKS

__all__ = ["Update"]

_grad_of, _hooks_of = attrgetter("grad"), attrgetter("_backward_hooks")


class Update:
    """The update of one window after the other.

    Args:
        optimizer: the user's.
        ranks: of the step; their buffers are put back when the window is abandoned.
        gradients: of the ranks.
        communication: how they are summed.
        loss_scale: of the losses.
        steps: updates so far.

    Attributes:
        loss_scale, steps: the same.
        optimizer_step: runs the optimizer on all devices.
        replicas: the ranks' parameters.
        window: the calls since the last update.
        used: per parameter whether the last update used it.
        is_made: the last call made one.
        broken: why this process cannot go on with the others; ``None``: it can.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ranks: Ranks,
        gradients: Gradients,
        communication: Communication,
        loss_scale: LossScale,
        steps: int,
    ) -> None:
        self.replicas, self._gradients, self._buffers = ranks.replicas, gradients, ranks.buffers
        self.loss_scale, self._processes = loss_scale, communication.processes
        self.optimizer_step = OptimizerStep(optimizer, ranks.replicas, gradients, communication.are_parts)
        self._shared_rows = 1.0  # of the last update, in all processes
        self.steps = steps
        self.window = Window("mean", 1)
        self.used: list[bool] = []
        self.is_made = False
        self._norm_parts: tuple[torch.Tensor | None, float | torch.Tensor | None] | None = None  # of the last update
        self._keeps_norm = not self.optimizer_step.is_flat  # until an update shows whether it writes gradients
        self._is_asked = False  # for it, and then it is kept
        self._versions: list[int] = []  # of the gradients that an update was made by
        self.broken: str | None = None

    def follow(self, *, updates: bool = False) -> bool:
        """Copy changes that the user made to parameters since the last call to all ranks.

        Args:
            updates: an update follows, by which parameters may have to be in a bucket.

        Returns:
            Whether the next update is made as the first one was: recordings of the ones before are void.

        Raises:
            RuntimeError: a parameter must be in a bucket by now, and several processes cannot lay out again.
        """
        replicas, optimizer_step, buckets = self.replicas, self.optimizer_step, self._gradients.buckets
        if buckets is None:
            return False
        if replicas.follow():
            self._gradients.register_hooks()
        if not replicas.have_left:
            if optimizer_step.has_copies and (changed := optimizer_step.values_changed()):
                replicas.send_values(changed)
                optimizer_step.remember_values()
            may_add = updates and buckets.left_out
            name = buckets.parameter_to_add(optimizer_step.parameters) if may_add else None
            if name is None:
                return False
            if self._processes is not None:
                raise RuntimeError(
                    f"parameter {name} was frozen, and none of the optimizer's, when the processes made this step, and "
                    "is trained now: call step.rebuild() in all processes"
                )
        optimizer_step.close()
        self._gradients.forget_layout()
        self.used = []
        return True

    def open_window(self, reduction: str, accumulate: int) -> None:
        """Begin to count the calls of the next update."""
        seeded = None if self._processes is None else self._shared_rows
        self.window = Window(reduction, accumulate, self.loss_scale.scale, seeded)

    def begin(self, options: Options) -> Window:
        """Prepare for the gradients of a call; the first one opens a window, with the options as they are now."""
        if not self.window.calls:
            self.open_window(options.reduction, options.accumulate)
            left_over = self.optimizer_step.left_over
            if left_over.watched:
                left_over.check(map(_grad_of, self.replicas.own))
            del left_over.spent[:]
            self._buffers.take()
        return self.window

    def close(self) -> None:
        """End the window: the next call opens another one."""
        self.window.calls = 0

    def restore(self) -> None:
        """Drop the gradients of the calls since the last update, and put running statistics back."""
        self._gradients.abandon()
        self._buffers.restore()
        self._norm_parts = None
        self.close()

    def commit(self, options: Options, losses: Sequence[RankLoss] = ()) -> None:
        """Make the update by the gradients of the window's calls; Ctrl-C waits while it does.

        Args:
            options: of now.
            losses: of the last call; an error says whose are not finite.

        Raises:
            FloatingPointError: a gradient is not finite; nothing has changed.
        """
        used, weight = self._gradients.finish(self.window.weight, self.optimizer_step.parameters)
        if self._processes is not None:
            self._shared_rows = float(weight) or self._shared_rows
        with uninterrupted():
            factor = self._factor(weight, options, losses)
            if factor is None:
                self._skip()
                return
            self._gradients.show(used)
            try:
                gradients = map(_grad_of, self.replicas.own)
                self._versions = list(map(getattr, gradients, repeat("_version"), repeat(0)))  # in C
                with tracer.span("update", ALL_RANKS, self.replicas.devices[0]) if tracer.sink else NULL_CONTEXT:
                    run = self.optimizer_step.prepare(used)
                    run(factor)
                    if not self._is_asked and self._keeps_norm:
                        self._keeps_norm = _versions_of(map(_grad_of, self.replicas.own)) != self._versions
                    self._count(used)
            except BaseException as error:
                self._failed(used, error)
                raise

    def _factor(
        self, weight: float | torch.Tensor, options: Options, losses: Sequence[RankLoss]
    ) -> float | torch.Tensor | None:
        """Return the update's factor for the sums of all calls, of this weight; ``None``: they overflow.

        Torch's optimizers take gradients as they are: for them the sums themselves are multiplied.
        """
        gradients, factor, is_flat = self._gradients, self.window.factor(weight), self.optimizer_step.is_flat
        clip_norm, error_if_nonfinite = options.clip_norm, options.error_if_nonfinite
        # A sum of torch's would find such numbers, too, but its threads would run next to those of the ranks.
        if self.loss_scale.is_on and not (float(self._norm(options)) < math.inf or are_finite(gradients.sums)):
            return None
        if factor is not None and not is_flat:
            multiply(gradients.sums, factor)
            factor = None
        norm = None
        if error_if_nonfinite or clip_norm is not None or self._keeps_norm:
            norm = self._norm(options)
            if error_if_nonfinite and not math.isfinite(float(norm)):
                i = gradients.not_finite()
                if i is not None:
                    count = 1 if self._processes is None else self._processes.count
                    by_rank = losses if options.loss_on == "ranks" else ()
                    values = [loss.value if loss.weight is None or bool(loss.weight) else None for loss in by_rank]
                    refuse(self.replicas.names[i], values, self.replicas.team.devices, count)
        self._norm_parts = norm, factor
        if norm is not None and clip_norm is not None:
            if is_flat:
                factor = factor_of(factor, norm, clip_norm)
            else:
                clip(gradients.sums, norm, clip_norm)
        return 1.0 if factor is None else factor

    def _norm(self, options: Options) -> torch.Tensor:
        """Return the norm of the sums; a recording names it by its use where nothing is clipped."""
        if not tracer.sink or options.clip_norm is not None:
            return self._gradients.norm()
        with tracer.span("check of gradients"):
            return self._gradients.norm()

    def grad_norm(self) -> torch.Tensor | None:
        """Return the norm of the last update's gradient before clipping, a scalar; ``None``: none is known.

        Raises:
            RuntimeError: nobody has asked before, and the gradients are gone.
        """
        self._is_asked = self._keeps_norm = True
        if self._norm_parts is None:
            return None
        norm, factor = self._norm_parts
        if norm is None:
            now = map(_grad_of, self.replicas.own) if self._gradients.buckets is None else ()
            spent = self.optimizer_step.left_over.spent
            is_gone = self.window.calls or any(map(is_not, now, spent))
            if is_gone or _versions_of(spent) != self._versions:
                raise RuntimeError(
                    "the gradients of the last update are gone or were changed: read grad_norm before zero_grad(), "
                    "clip_grad_norm_ and the next call. Once it was read, later updates keep theirs"
                )
            norm = self._gradients.norm()
        factor = to_device(factor, norm.device) if isinstance(factor, torch.Tensor) else factor
        return (norm * (1.0 if factor is None else factor)).to(norm.dtype)

    def _skip(self) -> None:
        """Drop the window: the loss scale was too large."""
        self.loss_scale.overflowed()
        self._norm_parts = None
        self._gradients.clear()
        self._buffers.drop()
        self.close()

    def _failed(self, used: list[bool], error: BaseException) -> None:
        """Note that the optimizer failed: the step counts if it has changed parameters all the same."""
        if self._processes is not None:  # the others have made it
            self.broken = f"its update failed after the sums over all processes ({type(error).__name__})"
        elif self.optimizer_step.has_written():  # a hook after the optimizer's step failed, say
            self._count(used)

    def _count(self, used: list[bool]) -> None:
        """Count an update of these parameters, and close the window."""
        optimizer_step = self.optimizer_step
        optimizer_step.left_over.spent[:] = map(_grad_of, self.replicas.own)
        if optimizer_step.left_over.watched:
            optimizer_step.left_over.note()
        optimizer_step.pre_hooks[LeftOverStep.KEY] = optimizer_step.left_over
        if optimizer_step.has_copies:
            optimizer_step.remember_values()
        self.used, self.is_made = used, True
        self.steps += 1
        self.window.calls = 0
        if self.loss_scale.is_on:
            self.loss_scale.went_well()
        if self._buffers.is_taken:
            self._buffers.drop()  # an interrupt that waited for this comes next, and must not undo a half

    def why_not_recorded(self, options: Options, *, is_whole: bool) -> str | None:
        """Return why no graph can hold the gradients of a step with these options; ``None``: it can.

        Args:
            options: as they are now.
            is_whole: the graph is to hold the update, too.
        """
        buckets = self._gradients.buckets
        reasons = (
            (self._processes is not None, "its gradients are summed over several processes"),
            (any(map(_hooks_of, self.replicas.own)), "a parameter has a hook"),
            (buckets is not None and bool(buckets.sparse), "some gradients are sparse"),
            (is_whole and options.error_if_nonfinite, "error_if_nonfinite=True waits for the gradients"),
            (
                is_whole and self.optimizer_step.memory is None,
                "its optimizer is none of mgpu_core.optim, or has step hooks",
            ),
        )
        return next((reason for holds, reason in reasons if holds), None)

    def replay(self, run: Callable[[], Any]) -> torch.Tensor | None:
        """Replay an update of the same parameters as the last one.

        With a loss scale it waits for the first device, which knows whether the gradients were finite.

        Args:
            run: replays the work on the devices, and returns the loss and the factor before clipping, of sums on the
                first device; ``None``: there is no recording.

        Returns:
            The loss.

        Raises:
            FloatingPointError: gradients are not finite, and the loss scale is not the reason.
        """
        with uninterrupted():
            self.optimizer_step.prepare(self.used)
            flat = self.optimizer_step.flat
            flat.scale_by(1.0)  # where the recording does not write a factor itself
            if self.loss_scale.is_on:  # it may end between forward and update
                self._buffers.take()
            replayed = run()
            if replayed is None:
                return None
            loss: torch.Tensor = replayed[0]
            flat.replayed()
            if self.loss_scale.is_on and flat.was_held_back():
                self._skip()
            else:
                self._gradients.show(self.used)
                self._versions = _versions_of(map(_grad_of, self.replicas.own))
                note_written(list(compress(self.replicas.own, self.used)))
                self._norm_parts = self._gradients.norm() if self._keeps_norm else None, replayed[1]
                self._count(self.used)
        return loss


def _versions_of(gradients: Iterable[torch.Tensor | None]) -> list[int]:
    """Return how often each gradient was written."""
    return list(map(getattr, gradients, repeat("_version"), repeat(0)))
