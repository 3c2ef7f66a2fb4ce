"""What a step works with, made from the module as it is: a rebuild makes all of it anew."""

from __future__ import annotations

import weakref
from typing import Any

from mgpu_core.processes.group import Processes
from mgpu_core.train.balance import SplitPlan
from mgpu_core.train.cuda_graphs import CapturedSteps
from mgpu_core.train.cycle import Cycle
from mgpu_core.train.grad_scaler import LossScale
from mgpu_core.train.options import Setup
from mgpu_core.train.passes import Passes
from mgpu_core.train.process_sync import Together
from mgpu_core.train.rank_losses import RankLosses
from mgpu_core.train.reducer import GradientSync
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.updates import Updates

__all__ = ["Parts"]


class Parts:
    """The parts of a step, and what holds for all of them at once.

    Args:
        setup: what the step is made from.
        split_plan, loss_scale: of the step; they outlive its parts.
        processes: those that train along; ``None``: none.
        steps: updates so far.

    Attributes:
        replicas, losses, sync, updates, passes, cycle: each is what its class says.
        captured: ``None`` without ``capture=True``.
        together: ``None`` where no other processes train along.

    Raises:
        TypeError, ValueError, RuntimeError: a module or an optimizer that none can be made from.
        Error: other processes have another step.
    """

    def __init__(
        self, setup: Setup, split_plan: SplitPlan, loss_scale: LossScale, processes: Processes | None, steps: int
    ) -> None:
        self._setup, self._loss_scale = setup, loss_scale
        self.together: Together | None = None
        if processes is not None:
            self.together = Together(processes, setup.module, setup.optimizer)
            self.agree(steps)
        self.losses = RankLosses(setup.loss_fn, setup.team)
        self.replicas = Replicas(setup.module, setup.team)
        self.in_shards = setup.shard_optimizer and len(self.replicas.devices) > 1
        self.sync = GradientSync(
            self.replicas, setup.bucket_nbytes, setup.algorithm, setup.comm_dtype, self.in_shards, processes
        )
        # Functions over handles alone: what they hold, lives as long as the process.
        self._finalizers = [weakref.finalize(self, _take_hooks_away, self.sync.handles)]
        self.updates = Updates(setup.optimizer, self.replicas, self.sync, self.in_shards)
        self.passes = Passes(
            self.replicas, self.losses, setup.reduction, setup.amp_dtype, setup.rng, setup.capture, setup.dim
        )
        self.cycle = Cycle(
            self.replicas, self.sync, self.updates, loss_scale, self.together, steps, self.losses.modules
        )
        self._watched = self.replicas.changes, self.replicas.attributes.changes
        self.captured: CapturedSteps | None = None
        if setup.capture:
            self.captured = CapturedSteps(
                self.replicas, self.sync, self.updates, self.passes, self.cycle, split_plan, loss_scale, setup.reduction
            )
        self.new_window()

    def agree(self, steps: int) -> None:
        """Raises Error unless the other processes, if any, have the same step, after so many updates."""
        if self.together is not None:
            self.together.start(self._facts(steps))

    def _facts(self, steps: int) -> dict[str, Any]:
        """What all processes must have in common, besides net and optimizer."""
        names = (
            "reduction", "accumulate", "clip_norm", "error_if_nonfinite", "amp_dtype", "bucket_nbytes", "algorithm",
            "comm_dtype",
        )  # fmt: skip
        own = {name: getattr(self._setup, name) for name in names}
        # The layout depends on it.
        shards = len(set(self._setup.team.devices)) if self._setup.shard_optimizer else 1
        return own | {"shards": shards, "updates": steps, "loss scale": self._loss_scale.scale}

    def new_window(self) -> None:
        """For the calls of the next update."""
        self.cycle.renew(self._setup.reduction, self._setup.accumulate)

    def bring_up_to_date(self) -> None:
        """Before a forward: all that ranks have of the user's."""
        self.refresh()
        self.replicas.buffers.mirror()
        self.losses.follow()

    def refresh(self) -> None:
        """Brings the ranks up to what the user has done to the module since the last call."""
        self.replicas.follow()
        now = self.replicas.changes, self.replicas.attributes.changes
        if now != self._watched:
            if now[0] != self._watched[0]:
                self.sync.watch_parameters()
            self.passes.look_for_draws()  # also where a rate of dropout was changed
            self._watched = now
        if changed := self.updates.values_changed():
            self.replicas.send_values(changed)
            self.updates.remember_values()

    def follow_the_optimizer(self) -> None:
        """Before an update: what is trained by now may be more than was laid out.

        Raises:
            RuntimeError: it is, and several processes cannot lay out again.
        """
        name = self.sync.layout.outgrown_by(self.updates.places)
        if name is None:
            return
        if self.together is not None:
            raise RuntimeError(
                f"parameter {name} was frozen, and none of the optimizer's, when the processes made this step, and is "
                "trained now: call step.rebuild() in all processes"
            )
        if self.captured is not None:
            self.captured.graphs.clear()
        self.cycle.forget_layout()

    def make_equal(self) -> None:
        """Gives all devices the values of the module, and all processes those of process 0."""
        if self.together is not None:
            self.together.take_values()
        self.replicas.send_values()
        self.updates.remember_values()

    def leave(self) -> None:
        """Gives module and optimizer memory of their own again."""
        for finalizer in self._finalizers:
            finalizer()
        if self.captured is not None:
            self.captured.graphs.clear()
        self.sync.abandon()
        self.updates.close()
        self.replicas.release()


def _take_hooks_away(handles: dict[Any, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
