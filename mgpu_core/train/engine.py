"""The order of a step, from a batch to an update: what :class:`mgpu_core.TrainStep` is the handle of.

What works is made once (``parts.py``), from the module as it is then::

    batch ── split ──> a part per rank ── forward, loss, backward ──> gradients ── sum ──> update ──> parameters
             passes    balance             passes, modules            gradients            cycle     updates, replicas
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from mgpu_core.caller import warn_caller
from mgpu_core.device.worker_choice import WorkerChoice, size_of
from mgpu_core.device.workers import time_limit
from mgpu_core.errors import Error
from mgpu_core.module_tree import named_parameters_of
from mgpu_core.nested import moved
from mgpu_core.nothing import NOTHING
from mgpu_core.processes.ballot import Standing
from mgpu_core.processes.group import Processes
from mgpu_core.train.balance import SplitPlan
from mgpu_core.train.bucket_sums import CommHook
from mgpu_core.train.checkpoint import load_state
from mgpu_core.train.cuda_graphs import CapturedSteps, why_no_graph
from mgpu_core.train.forward_backward import RankPart, seed
from mgpu_core.train.grad_scaler import LossScale
from mgpu_core.train.graph_cache import StepGraphs
from mgpu_core.train.loss import RankLoss, Window, joined_aux
from mgpu_core.train.loss_check import LossCheck, LossState, compare_losses, random_numbers_kept, warning_of
from mgpu_core.train.options import Setup, check_place
from mgpu_core.train.parts import Parts, agreed_settings
from mgpu_core.train.rollback import BufferSnapshot
from mgpu_core.train.updates import check_optimizer

__all__ = ["Engine"]

CallResult: TypeAlias = tuple[torch.Tensor, Any, dict[str, torch.Tensor]]  # loss, outputs, further numbers


class Engine:
    """Steps, one call at a time; whether one can be made is asked by :meth:`check_usable` before.

    Args:
        setup: what steps are made from.
        split_plan: who gets which rows.
        processes: those that train along; ``None``: none.

    Attributes:
        parts: what does the work.
        loss_scale: of float16.
        choice: how ranks run, in threads or one after the other.
        keeps_accumulating: no call updates.

    Raises:
        TypeError, ValueError, RuntimeError, Error: as for :class:`Parts`.
    """

    def __init__(self, setup: Setup, split_plan: SplitPlan, processes: Processes | None) -> None:
        self._setup, self._split_plan, self._processes = setup, split_plan, processes
        self.loss_scale = LossScale(setup.amp_dtype)
        self.keeps_accumulating = False
        self._is_checked = len(setup.team) < 2 or setup.loss_fn is None or setup.loss_on != "ranks"  # the loss
        self._broken: str | None = None
        self._is_closed = False
        self._hook: CommHook | None = None
        self.choice = WorkerChoice(setup.workers, setup.team.devices, setup.rng)
        self.parts = Parts(setup, split_plan, self.choice, self.loss_scale, processes, steps=0)

    @property
    def steps(self) -> int:
        """How many updates were made."""
        return self.parts.cycle.steps

    @property
    def graphs(self) -> StepGraphs | None:
        """The steps that were captured, if any are."""
        captured = self.parts.captured
        return None if captured is None else captured.graphs

    @property
    def is_accumulating(self) -> bool:
        """Whether there were calls since the last update."""
        window = self.parts.cycle.window
        return window.calls > 0

    def use_hook(self, hook: CommHook | None) -> None:
        """Let a hook sum buckets over the devices; one rank sends nothing."""
        self._hook = hook
        if self.parts.sync is not None:
            between = self.parts.sync.between
            between.hook = hook

    def train(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool, aux: bool) -> CallResult:
        """Make a step; all of it happens, or nothing, in all processes."""
        setup = self._setup
        try:
            parts = self._current_parts(is_update=True)
            if parts.captured is not None and parts.cycle.used:
                loss = self._replay(parts.captured, inputs, kwargs, keep_outputs or aux)
                if loss is not None:
                    return loss, None, {}
            parts.cycle.enter(setup.reduction, setup.accumulate)
            window, devices = parts.cycle.window, setup.team.devices
            is_last = not self.keeps_accumulating and window.calls + 1 >= setup.accumulate
            if self._split_plan.is_timed:
                self._split_plan.follow_the_clocks()
            cut, rows = parts.passes.split(inputs, kwargs, self._split_plan.shares)
            size, is_timed = None, False
            if self.choice.is_open:
                size = size_of(inputs[0]) if inputs else None
                is_timed = self.choice.begin(size, meets=parts.net.ranks_meet)
            if parts.sync is not None:
                parts.sync.begin(len(cut), overlap=is_last)
            losses, rows, outputs = self._forward_backward(window, cut, rows, inputs, keep_outputs)
            loss = window.add(rows, losses, devices[0])
            numbers = joined_aux(losses, rows, setup.reduction) if aux else {}
            if is_last:
                self._update(Standing.TRAINS)
            else:
                parts.gradients.set_aside()
            if is_timed:
                self.choice.end(size)
            return loss, outputs, numbers
        except BaseException as error:
            self._give_up(error)
            raise

    def conclude(self, standing: Standing = Standing.TRAINS) -> bool:
        """Update without another call; return whether any process had data for one."""
        try:
            parts = self.parts
            if parts.together is not None and parts.sync is not None:
                parts.together.open(parts.sync)
            parts.refresh()
            parts.follow_the_optimizer()
            parts.cycle.enter(self._setup.reduction, self._setup.accumulate)
            if parts.sync is not None:
                parts.sync.begin(0, overlap=False)
            return self._update(standing)
        except BaseException as error:
            self._give_up(error)
            raise

    def _forward_backward(
        self, window: Window, cut: list[RankPart], rows: list[int], inputs: tuple[Any, ...], keep_outputs: bool
    ) -> tuple[list[RankLoss], list[int], Any]:
        """Run forward, loss and backward of all ranks; return the losses, the rows of each, and joined outputs."""
        passes = self.parts.passes
        clocks = self._split_plan.clocks() if self._split_plan.is_timed else ()
        with NOTHING if torch.is_grad_enabled() else torch.enable_grad():
            if passes.gathers:
                weighed = [sum(rows)]
                loss, outputs = passes.run_gathered(cut, clocks, inputs[-1], window.seeds(weighed)[0], backward=True)
                losses = [loss]
            else:
                weighed, before = rows, None
                if not self._is_checked and len(cut) > 1:
                    self._is_checked, before = True, LossState(self._setup.loss_fn)
                seed(cut, window.seeds(rows))
                keep = keep_outputs or before is not None
                losses, each = passes.run(cut, clocks, backward=True, keep_outputs=keep)
                outputs = passes.joined(each) if each and keep_outputs else None
        self._split_plan.done(rows, clocks)
        if not passes.gathers and before is not None:
            self._check_loss(each or [], inputs[-1], losses, rows, before)
        return losses, weighed, outputs

    def _check_loss(
        self, outputs: list[Any], target: Any, losses: list[RankLoss], rows: list[int], before: LossState
    ) -> LossCheck:
        """Compare the losses of a call with the loss of all its rows, and warn where they differ."""
        setup = self._setup
        device = setup.team.devices[0]
        assert setup.loss_fn is not None  # without one nothing is checked
        passes = self.parts.passes
        with passes.autocast(device):
            check = compare_losses(
                setup.loss_fn, outputs, moved(target, device), losses, rows, setup.reduction, before,
                dim=setup.dim, is_half=setup.amp_dtype is not None,
            )  # fmt: skip
        if check.agrees is False:
            warn_caller(warning_of(check))
        return check

    def check_loss(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCheck:
        """Compare the loss of the gathered outputs with the sum of the ranks' on a batch; nothing is changed."""
        setup = self._setup
        if setup.loss_fn is None or setup.loss_on == "gathered":
            return LossCheck(None, reason="there is no loss function that is called per rank")
        parts = self._current_parts()
        cut, rows = parts.passes.split(inputs, kwargs, self._split_plan.shares)
        if len(cut) < 2:
            return LossCheck(None, reason="one rank has all rows")
        buffers, before = BufferSnapshot(parts.modules), LossState(setup.loss_fn)
        buffers.take()
        try:
            with torch.no_grad(), random_numbers_kept(parts.replicas.devices):
                losses, each = parts.passes.run(cut, (), backward=False, keep_outputs=True)
                return self._check_loss(each or [], inputs[-1], losses, rows, before)
        finally:
            buffers.restore()

    def evaluate(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool, aux: bool) -> CallResult:
        """Return what :meth:`train` returns, without gradients and without an update."""
        passes = self._current_parts().passes
        cut, rows = passes.split(inputs, kwargs, self._split_plan.shares)
        with torch.no_grad():
            try:
                if passes.gathers:
                    gathered, outputs = passes.run_gathered(cut, (), inputs[-1], 1.0, backward=False)
                    losses, rows = [gathered], [sum(rows)]
                else:
                    losses, each = passes.run(cut, (), backward=False, keep_outputs=keep_outputs)
                    outputs = passes.joined(each) if each else None
            except BaseException:
                if self._ranks_have_ended():
                    self._broken = None
                raise
            reduction, team = self._setup.reduction, self._setup.team
            loss = Window(reduction, 1).add(rows, losses, team.devices[0])
            return loss, outputs, joined_aux(losses, rows, reduction) if aux else {}

    def _replay(
        self, captured: CapturedSteps, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool
    ) -> torch.Tensor | None:
        """Return the loss of a step that was the replay of a graph; ``None``: it must go the ordinary way."""
        setup, parts = self._setup, self.parts
        collects = setup.accumulate > 1 or self.keeps_accumulating or self.is_accumulating
        is_measured = self._split_plan.asked == "auto"
        reason = why_no_graph(parts, setup, collects=collects, is_measured=is_measured, keep_outputs=keep_outputs)
        loss = None
        if reason is None:
            loss = captured.run(inputs, kwargs, setup.clip_norm)
        else:
            captured.graphs.skip(reason)
        if loss is None:
            captured.graphs.tell()
        else:
            parts.cycle.close()
        return loss

    def _current_parts(self, *, is_update: bool = False) -> Parts:
        """Return the parts for a call, made anew where the module has other parameters by now."""
        parts = self.parts
        if is_update and parts.together is not None and parts.sync is not None:
            parts.together.open(parts.sync)
        if parts.are_outdated():
            if parts.together is not None:
                raise RuntimeError(
                    "the parameters of the module are no longer those of this step: call step.rebuild() in all "
                    "processes"
                )
            if self.is_accumulating:
                raise RuntimeError(
                    "the parameters of the module have become others while gradients were accumulated: call "
                    "step.flush() before, or step.rebuild(), which drops the gradients"
                )
            self.rebuild(check=False)
        if self.parts.sync is not None:
            self.parts.refresh()
            if is_update:
                self.parts.follow_the_optimizer()
        return self.parts

    def _update(self, standing: Standing) -> bool:
        parts = self.parts
        if parts.sync is not None:
            parts.replicas.settle()  # a forward may have assigned `parameter.data`
        return parts.cycle.update(self._setup.clip_norm, bool(self._setup.error_if_nonfinite), standing) is not None

    def close(self) -> None:
        """Give module and optimizer memory of their own again; no further step can be made."""
        if not self._is_closed:
            self._is_closed = True
            self.parts.leave()

    def check_open(self) -> None:
        """Raise RuntimeError after :meth:`close`."""
        if self._is_closed:
            raise RuntimeError("this step was closed")

    def check_usable(self) -> None:
        """Raise unless a step can be made.

        Raises:
            RuntimeError: it was closed.
            Error: a failure has left something that no further step can mend.
        """
        if self._is_closed:
            self.check_open()
        if self._processes is not None and self._processes.lost is not None:
            raise Error(self._processes.lost)
        if self._broken is not None:
            raise Error(f"{self._broken}: call step.rebuild(), or make a new one")

    def _give_up(self, error: BaseException) -> None:
        """Wait for ranks that are still at work, and drop what the calls since the last update have left."""
        parts = self.parts
        parts.gradients.cancel()
        if not self._ranks_have_ended():
            return
        broken = None
        if parts.together is not None and parts.sync is not None:
            self._broken = "the other processes may not know that a step was given up"
            broken = parts.together.give_up(parts.sync, parts.cycle.steps, error)
        parts.cycle.restore()
        self._broken = broken or parts.cycle.broken

    def _ranks_have_ended(self) -> bool:
        """Wait, after a failure, for ranks that are still at work; where one does not end, the step is broken."""
        seconds = time_limit()
        self._broken = "a rank may still be at work in a step that was given up"  # until we know: Ctrl-C may come again
        passes = self.parts.passes
        if not passes.stop(seconds):
            self._broken = f"a rank was still at work {seconds:g} s after its step had failed"
            return False
        return True

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state, and its counts; raise as :meth:`mgpu_core.TrainStep.load_state_dict`."""
        parts = self.parts
        cycle, together = parts.cycle, parts.together
        try:
            load_state(state, self._setup.module, self._setup.optimizer)
        except BaseException as error:
            if together is not None:
                together.check_all_well(error)
            raise
        if together is not None:
            together.check_all_well(None)
        cycle.steps = int(state["steps"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        self._split_plan.resume(state["shares"])
        self.choice.resume(state.get("workers", ()))
        parts.gradients.abandon()
        cycle.close()
        if together is not None:
            self._broken = "the processes have loaded other states"
            together.start(agreed_settings(self._setup, cycle.steps, self.loss_scale.scale))
            self._broken = None

    def rebuild(self, *, check: bool = True) -> None:
        """Make all parts anew, from the module as it is; ``check``: that the optimizer has parameters of it alone."""
        setup, parts = self._setup, self.parts
        check_place(setup.module, setup.team)
        if check:
            check_optimizer(setup.optimizer, dict(named_parameters_of(setup.module)))
        self._broken = "it could not be built"
        parts.leave()
        self.parts = Parts(setup, self._split_plan, self.choice, self.loss_scale, self._processes, self.steps)
        self.use_hook(self._hook)
        self._broken = None
