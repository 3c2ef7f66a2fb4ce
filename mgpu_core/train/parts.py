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
from mgpu_core.train.reducer import GradientSync, OwnGradients
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
        replicas, modules, gradients, updates, passes, cycle: each is what its class says.
        sync: the gradients of several ranks; ``None``: one rank is alone, and nothing is summed.
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
        self.together: Together | None = None
        if processes is not None:
            self.together = Together(processes, setup.module, setup.optimizer)
            self.together.start(agreed_settings(setup, steps, loss_scale.scale))
        self.replicas = Replicas(setup.module, setup.team)
        static = setup.static_graph or setup.capture
        net = RankModules(setup.module, setup.team, self.replicas.parameters, static=static)
        loss = loss_of_ranks(setup.loss_fn, setup.team, static=static)
        self.modules = [net, *([loss] if isinstance(loss, RankModules) else [])]
        self.net = net
        if setup.workers == "caller" and net.ranks_meet and len(setup.team) > 1:
            raise ValueError(
                'workers="caller" runs the ranks one after the other, and those of this module meet in synchronised '
                'layers: use workers="threads" or "auto"'
            )
        self.in_shards = setup.shard_optimizer and len(self.replicas.devices) > 1
        self.sync = self._sync(setup, processes)
        self.gradients = OwnGradients(self.replicas) if self.sync is None else self.sync
        self.updates = Updates(setup.optimizer, self.replicas, self.gradients, self.in_shards)
        # Ranks that share a GPU take turns where a graph is recorded on their stream; those that meet have no graphs.
        rng = "per_rank" if setup.capture and not net.ranks_meet else setup.rng
        self.passes = ForwardBackward(setup, self.replicas, net, loss, rng, choice)
        buffers = BufferSnapshot(self.modules)
        self.cycle = Cycle(self.replicas, self.gradients, self.updates, loss_scale, self.together, steps, buffers)
        self.captured: CapturedSteps | None = None
        if setup.capture and self.sync is not None:
            self.captured = CapturedSteps(
                self.replicas, self.modules, self.sync, self.updates, self.passes, self.cycle, split_plan, loss_scale,
                setup.reduction,
            )  # fmt: skip

    def _sync(self, setup: Setup, processes: Processes | None) -> GradientSync | None:
        if len(setup.team) == 1 and processes is None and not setup.capture:
            return None
        sync = GradientSync(
            self.replicas, setup.bucket_nbytes, setup.algorithm, setup.comm_dtype, self.in_shards, processes
        )
        # A function over handles alone: what it holds, lives as long as the process.
        self._take_hooks_away = weakref.finalize(self, _take_away, sync.handles)
        return sync

    def are_outdated(self) -> bool:
        """Read the modules as they are now; return whether the net has other parameters than these parts."""
        for each in self.modules:
            each.read()
        return not self.replicas.are_those_of(self.net.tree)

    def refresh(self) -> None:
        """Bring the ranks' parameters up to what the user has done to them since the last call."""
        if self.sync is None:
            return
        if self.replicas.follow():
            self.sync.watch_parameters()
        if changed := self.updates.values_changed():
            self.replicas.send_values(changed)
            self.updates.remember_values()

    def follow_the_optimizer(self) -> None:
        """Before an update: lay out again where more is trained by now than was laid out.

        Raises:
            RuntimeError: it is, and several processes cannot lay out again.
        """
        if self.sync is None:
            return
        layout = self.sync.layout
        name = layout.outgrown_by(self.updates.places)
        if name is None:
            return
        if self.together is not None:
            raise RuntimeError(
                f"parameter {name} was frozen, and none of the optimizer's, when the processes made this step, and is "
                "trained now: call step.rebuild() in all processes"
            )
        if self.captured is not None:
            graphs = self.captured.graphs
            graphs.clear()
        self.cycle.forget_layout()

    def make_equal(self) -> None:
        """Give all devices the values of the module, and all processes those of process 0."""
        if self.together is not None:
            self.together.take_values()
        self.replicas.send_values()
        self.updates.remember_values()

    def leave(self) -> None:
        """Give module and optimizer memory of their own again."""
        if self.sync is not None:
            self._take_hooks_away()
        if self.captured is not None:
            graphs = self.captured.graphs
            graphs.clear()
        self.gradients.abandon()
        self.updates.leave()
        self.replicas.release()


def agreed_settings(setup: Setup, steps: int, scale: float) -> dict[str, Any]:
    """Return what all processes must have in common, besides net and optimizer."""
    names = (
        "reduction", "accumulate", "clip_norm", "error_if_nonfinite", "amp_dtype", "bucket_nbytes", "algorithm",
        "comm_dtype",
    )  # fmt: skip
    shards = len(set(setup.team.devices)) if setup.shard_optimizer else 1  # the layout depends on it
    own = {name: getattr(setup, name) for name in names}
    return own | {"shards": shards, "updates": steps, "loss scale": scale}


def _take_away(handles: dict[Any, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
