"""From one update to the next: the calls whose gradients it is made of, and the commit point at its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import compress

import torch

from mgpu_core.device.memory import note_written
from mgpu_core.entries import ALL_RANKS
from mgpu_core.processes.ballot import Standing
from mgpu_core.record import span
from mgpu_core.train.grad_clip import are_finite, check_finite, clip, factor_of, multiply
from mgpu_core.train.grad_scaler import LossScale
from mgpu_core.train.loss import Window
from mgpu_core.train.process_sync import Together
from mgpu_core.train.reducer import GradientSync, OwnGradients
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.rollback import BufferSnapshot, uninterrupted
from mgpu_core.train.updates import Updates

__all__ = ["Cycle"]


class Cycle:
    """The way from one update to the next, again and again.

    Up to its commit point nothing changes that lasts: parameters, optimizer, counts.  Running statistics do, and are
    put back when the cycle is abandoned.

    Args:
        replicas, gradients, updates: of the step.
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
        gradients: OwnGradients | GradientSync,
        updates: Updates,
        loss_scale: LossScale,
        together: Together | None,
        steps: int,
        buffers: BufferSnapshot,
    ) -> None:
        self._replicas, self._gradients, self._updates = replicas, gradients, updates
        self._sync = gradients if isinstance(gradients, GradientSync) else None
        self._loss_scale, self._together = loss_scale, together
        self._buffers = buffers
        self.steps = steps
        self.window = Window("mean", 1)
        self.used: list[bool] = []  # parameters, in the last update
        self.broken: str | None = None  # why this process cannot go on with the others

    def open_window(self, reduction: str, accumulate: int) -> None:
        """Begin to count the calls of the next update."""
        rows = None if self._together is None else self._together.rows
        shared = self._together is not None
        self.window = Window(reduction, accumulate, self._loss_scale.scale, rows, shared=shared)

    def enter(self, reduction: str, accumulate: int) -> None:
        """Before a call adds its gradients: the first one of a window opens it, with the settings as they are now."""
        if self.window.calls:
            self._gradients.take_up()
            return
        self.open_window(reduction, accumulate)
        self._updates.spent.clear()
        self._gradients.clear()
        self._buffers.take()

    def close(self) -> None:
        """End the window: the next call opens another one."""
        self.window.calls = 0

    def restore(self) -> None:
        """Drop what the calls since the last update have left."""
        self._gradients.abandon()
        self._buffers.restore()
        self.close()

    def update(
        self, clip_norm: float | None, error_if_nonfinite: bool, standing: Standing = Standing.TRAINS
    ) -> bool | None:
        """Update by the gradients of the window's calls: the commit point.

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
        sync = self._sync
        if sync is not None:
            if sync.layout.is_empty and not self._lay_out(sync, standing):
                return None
            sync.finish()
        with uninterrupted() as interrupted:
            used, weight = self._gradients.used(), self.window.weight
            if sync is not None and self._together is not None:
                decided = self._decide(sync, self._together, standing, clip_norm, interrupted)
                if decided is None:
                    return None
                used, weight, clip_norm = decided
            factor = self._factor(weight, clip_norm, error_if_nonfinite)
            if factor is None:
                self._skip_update()
                return False
            if sync is not None:
                sync.show(used)
            self._make_update(used, factor)
            return True

    def _factor(
        self, weight: float | torch.Tensor, clip_norm: float | None, error_if_nonfinite: bool
    ) -> float | torch.Tensor | None:
        """Return what the update multiplies the sums of all calls by, which weigh so much; ``None``: they overflow.

        Torch's optimizers take gradients as they are: for them the sums themselves are multiplied.
        """
        gradients, factor, is_flat = self._gradients, self.window.factor(weight), self._updates.is_flat
        if self._loss_scale.is_on and not are_finite(gradients, gradients.norm()):
            return None
        if factor is not None and not is_flat:
            multiply(gradients.sums, factor)
            factor = None
        if error_if_nonfinite or clip_norm is not None:
            norm = gradients.norm()
            if error_if_nonfinite and not math.isfinite(float(norm)):
                processes = 1 if self._together is None else self._together.processes.count
                check_finite(gradients, norm, self._replicas, processes)
            if clip_norm is not None and is_flat:
                factor = factor_of(factor, norm, clip_norm)
            elif clip_norm is not None:
                clip(gradients.sums, norm, clip_norm)
        return 1.0 if factor is None else factor

    def _skip_update(self) -> None:
        """The loss scale was too large."""
        self._loss_scale.overflowed()
        self._gradients.clear()
        self._buffers.drop()
        self.window.calls = 0

    def _make_update(self, used: list[bool], factor: float | torch.Tensor) -> None:
        try:
            with span("update", ALL_RANKS, self._replicas.devices[0]):
                self._updates.launch(used, factor)
                self._count(used)
        except BaseException as error:
            if self._together is not None:  # the others have made it
                self.broken = f"its update failed after all processes had agreed on it ({type(error).__name__})"
            elif self._updates.has_written():  # a hook behind the optimizer's step failed, say: the step counts
                self._count(used)
            raise

    def _count(self, used: list[bool]) -> None:
        self._updates.conclude()
        self.used = used
        self.steps += 1
        self.window.calls = 0
        if self._loss_scale.is_on:
            self._loss_scale.went_well()
        self._buffers.drop()  # an interrupt that waited for this comes next, and must not undo a half

    def replayed(self, sync: GradientSync, replay: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """An update of the same parameters as the last one, whose work on the devices is replayed.

        With a loss scale it waits for the first device, which knows whether the gradients were finite.

        Returns:
            What ``replay`` does; ``None``: there was no replay.

        Raises:
            FloatingPointError: gradients are not finite, and the loss scale is not the reason.
        """
        with uninterrupted():
            self._updates.prepare(self.used)
            self._updates.flat.begin_replay()
            if self._loss_scale.is_on or len(self._replicas.devices) > 1:  # it may end between forward and update
                self._buffers.take()
            loss = replay()
            if loss is None:
                return None
            self._updates.flat.replayed()
            if self._loss_scale.is_on and self._updates.flat.was_held_back():
                self._skip_update()
            else:
                sync.show(self.used)
                note_written(list(compress(self._replicas.own, self.used)))
                self._count(self.used)
        return loss

    def forget_layout(self) -> None:
        """Make the next update as the first one was made."""
        self._updates.close()
        if self._sync is not None:
            self._sync.forget_layout()
        self.used = []

    def _lay_out(self, sync: GradientSync, standing: Standing) -> bool:
        learnt = sync.learnt(self._updates.places())
        if self._together is not None:
            agreed = self._together.learn(sync, learnt, self.window, standing)
            if agreed is None:
                return False
            learnt = agreed
        with uninterrupted():
            sync.lay_out(learnt)
        if self._together is not None:
            self._together.confirm_layout()
            sync.open_outbox()
        return True

    def _decide(
        self,
        sync: GradientSync,
        together: Together,
        standing: Standing,
        clip_norm: float | None,
        interrupted: Callable[[], bool],
    ) -> tuple[list[bool], float | torch.Tensor, float | None] | None:
        """Agree with the other processes on the parameters to update, what all calls weigh, and the largest norm.

        Returns:
            ``None``: nobody has any data.
        """
        settings = {"clip": clip_norm, "planned": self.window.planned, "hook": sync.between.hook is not None}
        tally, followed = together.decide(sync, self.window, self.steps, standing, settings, interrupted)
        if all(each == Standing.JOINED for each in tally.standings):
            return None
        if standing == Standing.JOINED:
            self.window.follow(followed["planned"])
        return tally.used, tally.weight, followed["clip"]
