"""From one update to the next: the calls whose gradients it is made of, and the commit point at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mgpu_core.entries import ALL_RANKS
from mgpu_core.processes.ballot import Standing
from mgpu_core.record import span
from mgpu_core.train.grad_clip import (
    GradientNorm,
    are_finite,
    check_finite,
    clip,
    factor_of,
    multiply,
    overflow_of,
    warm_up,
)
from mgpu_core.train.grad_scaler import LossScale
from mgpu_core.train.loss import Window
from mgpu_core.train.process_sync import Together
from mgpu_core.train.reducer import GradientSync
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.rollback import BufferSnapshot, uninterrupted
from mgpu_core.train.updates import Updates

__all__ = ["Cycle"]


class Cycle:
    """The way from one update to the next, again and again.

    Up to its commit point nothing changes that lasts: parameters, optimizer, counts.  Running statistics do, and are
    put back when the cycle is abandoned.

    Args:
        replicas, sync, updates: of the step.
        loss_scale: of its losses.
        together: its process among others; ``None``: it is alone.
        steps: updates so far.
        buffers: what is put back when the cycle is abandoned.

    Attributes:
        steps: the same.
        window: the calls since the last update.
    """

    def __init__(
        self,
        replicas: Replicas,
        sync: GradientSync,
        updates: Updates,
        loss_scale: LossScale,
        together: Together | None,
        steps: int,
        buffers: BufferSnapshot,
    ) -> None:
        self._replicas, self._sync, self._updates = replicas, sync, updates
        self._loss_scale, self._together = loss_scale, together
        self._buffers = buffers
        self.steps = steps
        self.used: list[bool] = []  # parameters, in the last update
        self.broken: str | None = None  # why this process cannot go on with the others

    def renew(self, reduction: str, accumulate: int) -> None:
        """Open a new window; running statistics stay as the last one has left them."""
        self._buffers.drop()
        self.open_window(reduction, accumulate)

    def open_window(self, reduction: str, accumulate: int) -> None:
        """A new window alone."""
        rows = None if self._together is None else self._together.rows
        shared = self._together is not None
        self.window = Window(reduction, accumulate, self._loss_scale.scale, rows, shared=shared)

    def enter(self) -> None:
        """Before a call adds its gradients."""
        if self.window.calls == 0:
            self._sync.clear()
            self._buffers.take()
        else:
            self._sync.take_up()

    def restore(self) -> None:
        """Drops what the calls since the last update have left."""
        self._sync.abandon()
        self._buffers.restore()

    def update(
        self, clip_norm: float | None, error_if_nonfinite: bool, standing: Standing = Standing.TRAINS
    ) -> bool | None:
        """The commit point, behind the backward of the last call.

        Args:
            clip_norm: the largest norm of all gradients.
            error_if_nonfinite: whether one that is not finite is an error.
            standing: what this process tells the others.

        Returns:
            Whether there was an update; False: the loss scale was too large, and the gradients are dropped.  ``None``:
            no process has any data left.

        Raises:
            FloatingPointError: a gradient is not finite.
            Error: another process could not update.
        """
        if self._sync.layout.is_empty and not self._lay_out(standing):
            return None
        self._sync.finish()
        with uninterrupted() as interrupted:
            own = {"clip": clip_norm, "planned": self.window.planned, "hook": self._sync.between.hook is not None}
            decided = self._decide(standing, own, interrupted)
            if decided is None:
                return None
            used, weight, settings = decided
            clip_norm = settings["clip"]
            if self._loss_scale.is_on and not are_finite(self._sync.layout.sums, self._norm.compute()):
                self._skip_update()
                return False
            check = self._check_finite if error_if_nonfinite else None
            factor = self._finish_gradients(weight, clip_norm, check)
            self._sync.show(used)
            self._make_update(used, factor)
            return True

    def _skip_update(self) -> None:
        """The loss scale was too large."""
        self._loss_scale.overflowed()
        self._sync.clear()
        self._buffers.drop()

    def _make_update(self, used: list[bool], factor: float | torch.Tensor) -> None:
        try:
            with span("update", ALL_RANKS, self._replicas.devices[0]):
                self._updates.prepare(used)
                if self._updates.is_flat:
                    self._updates.flat.scale_by(factor)
                self._updates.launch()
                self._conclude(used)
        except BaseException as error:
            if self._together is not None:  # the others have made it
                self.broken = f"its update failed after all processes had agreed on it ({type(error).__name__})"
            elif self._updates.has_written():  # a hook behind the optimizer's step failed, say: the step counts
                self._count(used)
            raise

    def _conclude(self, used: list[bool]) -> None:
        self._updates.conclude(used)
        self._count(used)

    def _count(self, used: list[bool]) -> None:
        self.used = used
        self.steps += 1
        self._loss_scale.went_well()
        self._buffers.drop()  # an interrupt that waited for this comes next, and must not undo a half

    def replayed(self, replay: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """An update of the same parameters as the last one, whose work on the devices is replayed.

        On each device it ends in :meth:`work_on`.  With a loss scale it waits for the first one: whether the gradients
        were finite, decides about the next scale.

        Returns:
            What ``replay`` does; ``None``: there was no replay.

        Raises:
            FloatingPointError: gradients are not finite, and the loss scale is not the reason.
        """
        with uninterrupted():
            self._updates.prepare(self.used)
            self._updates.flat.scale_by(1.0)
            if self._loss_scale.is_on or len(self._replicas.devices) > 1:  # it may end between forward and update
                self._buffers.take()
            loss = replay()
            if loss is None:
                return None
            self._updates.flat.replayed()
            if self._loss_scale.is_on and self._updates.flat.was_held_back():
                self._skip_update()
            else:
                self._sync.show(self.used)
                self._conclude(self.used)
        return loss

    def norm_on(self, place: int) -> GradientNorm:
        """Return the norm of the sums that one device has; :meth:`work_on` the device can be captured from now on."""
        sums = self._sync.layout.sums.on(place)
        warm_up(sums)
        return GradientNorm(sums)

    def work_on(self, place: int, norm: GradientNorm, weight: float | torch.Tensor, clip_norm: float | None) -> None:
        """What one device does for an update, behind the sums of the only call: nobody waits for it.

        Args:
            place: of the device.
            norm: :meth:`norm_on` it.
            weight: of the call; a tensor lies on the device.
            clip_norm: the largest norm of all gradients.
        """
        if self._loss_scale.is_on:
            self._updates.flat.hold_back(place, overflow_of(self._sync.layout.sums.on(place)))
        factor = self.window.factor(weight)
        if clip_norm is not None:
            factor = factor_of(factor, norm.compute(), clip_norm)
        self._updates.flat.launch_on(place, factor)

    def forget_layout(self) -> None:
        """The next update is made as the first one was."""
        self._updates.close()
        self._sync.forget_layout()
        self.used = []

    def check_used(self) -> None:
        """Raises RuntimeError unless the same parameters have gradients as in the last update."""
        if self._sync.used() != self.used:
            raise RuntimeError("this batch uses other parameters than the one before")

    def _finish_gradients(
        self, weight: float | torch.Tensor, clip_norm: float | None, check: Callable[[torch.Tensor], None] | None
    ) -> float | torch.Tensor:
        """Return what the update multiplies the sums of all calls by, which weigh so much.

        Torch's optimizers take gradients as they are: for them the sums themselves are multiplied.
        """
        sums, factor = self._sync.layout.sums, self.window.factor(weight)
        if factor is not None and not self._updates.is_flat:
            multiply(sums, factor)
            factor = None
        if check is not None or clip_norm is not None:
            norm = self._norm.compute()
            if check is not None:
                check(norm)
            if clip_norm is not None and self._updates.is_flat:
                factor = factor_of(factor, norm, clip_norm)
            elif clip_norm is not None:
                clip(sums, norm, clip_norm)
        return 1.0 if factor is None else factor

    def _check_finite(self, norm: torch.Tensor) -> None:
        processes = 1 if self._together is None else self._together.processes.count
        check_finite(self._sync.layout.sums, norm, self._replicas, processes)

    def _lay_out(self, standing: Standing) -> bool:
        learnt = self._sync.learnt(self._updates.places())
        if self._together is not None:
            agreed = self._together.learn(self._sync, learnt, self.window, standing)
            if agreed is None:
                return False
            learnt = agreed
        with uninterrupted():
            self._sync.lay_out(learnt)
        self._norm = GradientNorm(self._sync.layout.sums)
        if self._together is not None:
            self._together.confirm_layout()
            self._sync.open_outbox()
        return True

    def _decide(
        self, standing: Standing, settings: dict[str, Any], interrupted: Callable[[], bool]
    ) -> tuple[list[bool], float | torch.Tensor, Mapping[str, Any]] | None:
        """Which parameters are updated, what all calls weigh, and the settings; ``None``: nobody has any data."""
        if self._together is None:
            return self._sync.used(), self.window.weight, settings
        tally, followed = self._together.decide(self._sync, self.window, self.steps, standing, settings, interrupted)
        if all(each == Standing.JOINED for each in tally.standings):
            return None
        if standing == Standing.JOINED:
            self.window.follow(followed["planned"])
        return tally.used, tally.weight, followed
