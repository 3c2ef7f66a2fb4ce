"""What a step works with, made from the module as it is: a rebuild makes all of it anew."""

from __future__ import annotations

import weakref
from typing import Any

from mgpu_core.device.worker_choice import WorkerChoice
from mgpu_core.processes.group import Processes
from mgpu_core.train.balance import SplitPlan
from mgpu_core.train.cuda_graphs import CapturedSteps
from mgpu_core.train.cycle import Cycle
from mgpu_core.train.forward_backward import ForwardBackward
from mgpu_core.train.grad_scaler import LossScale
from mgpu_core.train.loss import loss_of_ranks
from mgpu_core.train.options import Setup
from mgpu_core.train.process_sync import Together
from mgpu_core.train.rank_modules import RankModules
from mgpu_core.train.reducer import GradientSync
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.rollback import BufferSnapshot
from mgpu_core.train.updates import Updates

__all__ = ["Parts"]


class Parts:
    """The parts of a step, and what holds for all of them at once.

    Args:
        setup: what the step is made from.
        split_plan, choice, loss_scale: of the step; they outlive its parts.
        processes: those that train along; ``None``: none.
        steps: updates so far.

    Attributes:
        replicas, modules, sync, updates, passes, cycle: each is what its class says.
        captured: ``None`` without ``capture=True``.
        together: ``None`` where no other processes train along.

    Raises:
        TypeError, ValueError, RuntimeError: a module or an optimizer that none can be made from.
        Error: other processes have another step.
    """

    def __init__(
        self,
        setup: Setup,
        split_plan: SplitPlan,
        choice: WorkerChoice,
        loss_scale: LossScale,
        processes: Processes | None,
        steps: int,
    ) -> None:
        self._setup, self._loss_scale = setup, loss_scale
        self.together: Together | None = None
        if processes is not None:
            self.together = Together(processes, setup.module, setup.optimizer)
            self.agree(steps)
        self.replicas = Replicas(setup.module, setup.team)
        static = setup.static_graph or setup.capture
        net = RankModules(setup.module, setup.team, self.replicas.parameters, static=static)
        loss = loss_of_ranks(setup.loss_fn, setup.team, static=static)
        self.modules = [net, *([loss] if isinstance(loss, RankModules) else [])]
        self._net = net
        if setup.workers == "caller" and net.tree.ranks_meet and len(setup.team) > 1:
            raise ValueError(
                'workers="caller" runs the ranks one after the other, and those of this module meet in synchronised '
                'layers: use workers="threads" or "auto"'
            )
        self.in_shards = setup.shard_optimizer and len(self.replicas.devices) > 1
        self.sync = GradientSync(
            self.replicas, setup.bucket_nbytes, setup.algorithm, setup.comm_dtype, self.in_shards, processes
        )
        # Functions over handles alone: what they hold, lives as long as the process.
        self._finalizers = [weakref.finalize(self, _take_hooks_away, self.sync.handles)]
        self.updates = Updates(setup.optimizer, self.replicas, self.sync, self.in_shards)
        # Ranks that share a GPU take turns where a graph is recorded on their stream; those that meet have no graphs.
        rng = "per_rank" if setup.capture and not net.tree.ranks_meet else setup.rng
        self.passes = ForwardBackward(
            self.replicas,
            net,
            loss,
            setup.reduction,
            setup.amp_dtype,
            rng,
            choice,
            setup.dim,
            setup.loss_on == "gathered",
        )
        buffers = BufferSnapshot(self.modules)
        self.cycle = Cycle(self.replicas, self.sync, self.updates, loss_scale, self.together, steps, buffers)
        self.captured: CapturedSteps | None = None
        if setup.capture:
            self.captured = CapturedSteps(
                self.replicas,
                self.modules,
                self.sync,
                self.updates,
                self.passes,
                self.cycle,
                split_plan,
                loss_scale,
                setup.reduction,
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

    def are_outdated(self) -> bool:
        """Read the modules as they are now; return whether the net has other parameters than these parts."""
        for each in self.modules:
            each.read()
        return not self.replicas.are_those_of(self._net.tree)

    def refresh(self) -> None:
        """Bring the ranks' parameters up to what the user has done to them since the last call."""
        if self.replicas.follow():
            self.sync.watch_parameters()
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
        self.updates.leave()
        self.replicas.release()


def _take_hooks_away(handles: dict[Any, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
