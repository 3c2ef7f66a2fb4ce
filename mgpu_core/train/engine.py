"""The order of a step, from a batch to an update: what :class:`mgpu_core.TrainStep` is the handle of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

from mgpu_core.caller import warn_caller
from mgpu_core.device.streams import caller_streams
from mgpu_core.device.worker_choice import WorkerChoice, size_of
from mgpu_core.device.workers import time_limit
from mgpu_core.errors import Error
from mgpu_core.module_tree import named_parameters_of
from mgpu_core.nested import moved
from mgpu_core.processes.ballot import Standing
from mgpu_core.processes.group import Processes
from mgpu_core.train.balance import SplitPlan
from mgpu_core.train.checkpoint import load_state
from mgpu_core.train.cuda_graphs import CapturedSteps
from mgpu_core.train.forward_backward import seed
from mgpu_core.train.grad_scaler import LossScale
from mgpu_core.train.graph_cache import GRAPH_DEVICE
from mgpu_core.train.loss import RankLoss, Window, joined_aux
from mgpu_core.train.loss_check import LossCheck, LossState, compare_losses, random_numbers_kept, warning_of
from mgpu_core.train.options import Setup, check_place
from mgpu_core.train.parts import Parts
from mgpu_core.train.rollback import BufferSnapshot
from mgpu_core.train.updates import check_optimizer

__all__ = ["Engine"]

_T = TypeVar("_T")
CallResult: TypeAlias = tuple[torch.Tensor, Any, dict[str, torch.Tensor]]  # loss, outputs, further numbers


_COLLECTS = "gradients are accumulated over several calls"


class Engine:
    """Steps, one call at a time; whether one can be made is asked by :meth:`check_whole` before.

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
        self._is_checked = False  # the loss, in the first call
        self._broken: str | None = None
        self.choice = WorkerChoice(setup.workers, setup.team.devices, setup.rng)
        self.parts = Parts(setup, split_plan, self.choice, self.loss_scale, processes, steps=0)

    def check_whole(self) -> None:
        """Raises Error where a failure has left something that no further step can mend."""
        if self._processes is not None and self._processes.lost is not None:
            raise Error(self._processes.lost)
        if self._broken is not None:
            raise Error(f"{self._broken}: call step.rebuild(), or make a new one")

    def train(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool, aux: bool) -> CallResult:
        """Make a step; all of it happens, or nothing, in all processes."""
        return self._whole(partial(self._train, inputs, kwargs, keep_outputs, aux))

    def conclude(self, standing: Standing = Standing.TRAINS) -> bool:
        """An update without another call; says whether any process had data for one."""
        return self._whole(partial(self._conclude, standing))

    def _whole(self, work: Callable[[], _T]) -> _T:
        try:
            if self.parts.together is not None:
                self.parts.together.open(self.parts.sync)
            return work()
        except BaseException as error:
            self._give_up(error)
            raise

    def _train(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool, aux: bool) -> CallResult:
        parts = self._current_parts()
        parts.follow_the_optimizer()
        if parts.captured is not None and parts.cycle.used:
            loss = self._replay(parts.captured, inputs, kwargs, keep_outputs or aux)
            if loss is not None:
                return loss, None, {}
        self._enter()
        is_last = not self.keeps_accumulating and parts.cycle.window.calls + 1 >= self._setup.accumulate
        self._split_plan.follow_the_clocks()
        size = size_of(inputs[0]) if inputs else None
        is_timed = self.choice.begin(size, meets=parts.modules[0].tree.ranks_meet)
        result = self._compute(inputs, kwargs, overlap=is_last, keep_outputs=keep_outputs, aux=aux)
        if is_last:
            self._update(Standing.TRAINS)
        else:
            parts.sync.set_aside()
        if is_timed:
            self.choice.end(size)
        return result

    def _compute(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, overlap: bool, keep_outputs: bool, aux: bool
    ) -> CallResult:
        """Forward, loss and backward of all ranks."""
        window, passes = self.parts.cycle.window, self.parts.passes
        cut, rows = passes.split(inputs, kwargs, self._split_plan.shares)
        self.parts.sync.begin(len(cut), overlap=overlap, streams=caller_streams(self._setup.team.devices))
        clocks = self._split_plan.clocks()
        before = self._before_a_check(len(cut))
        with torch.enable_grad():
            if passes.gathers:
                weighed = [sum(rows)]
                seeded = window.seeds(weighed)[0]
                loss, outputs = passes.run_gathered(cut, clocks, inputs[-1], seeded, backward=True)
                losses, each = [loss], None
            else:
                weighed = rows
                seed(cut, window.seeds(rows))
                keep = keep_outputs or before is not None
                losses, each = passes.run(cut, clocks, backward=True, keep_outputs=keep)
                outputs = passes.joined(each) if each and keep_outputs else None
        self._split_plan.done(rows, clocks)
        if before is not None:
            self._check_loss(each or [], inputs[-1], losses, rows, before)
        return self._result(window, weighed, losses, outputs, aux)

    def _result(self, window: Window, rows: list[int], losses: list[RankLoss], outputs: Any, aux: bool) -> CallResult:
        """Count a call that went through; return its loss as one device would have it, outputs, and further numbers."""
        loss = window.add(rows, losses, self._setup.team.devices[0])
        return loss, outputs, joined_aux(losses, rows, self._setup.reduction) if aux else {}

    def _before_a_check(self, ranks: int) -> LossState | None:
        """Return the loss function's state where this call, the first one of several ranks, is to be checked."""
        if self._is_checked or ranks < 2 or self._setup.loss_fn is None or self._setup.loss_on != "ranks":
            return None
        self._is_checked = True
        return LossState(self._setup.loss_fn)

    def _check_loss(
        self, outputs: list[Any], target: Any, losses: list[RankLoss], rows: list[int], before: LossState
    ) -> LossCheck:
        """Compare the losses of a call with the loss of all its rows, and warn where they differ."""
        setup = self._setup
        device = setup.team.devices[0]
        assert setup.loss_fn is not None  # without one nothing is checked
        with self.parts.passes.autocast(device):
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

    def _replay(
        self, captured: CapturedSteps, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool
    ) -> torch.Tensor | None:
        """The loss of a step that was the replay of a graph; ``None``: it must go the ordinary way."""
        reason = self._why_no_graph(keep_outputs)
        loss = None
        if reason is None:
            loss = captured.run(inputs, kwargs, self._setup.clip_norm)
        else:
            captured.graphs.skip(reason)
        if loss is None:
            captured.graphs.tell()
        else:
            self.parts.new_window()
        return loss

    def _why_no_graph(self, keep_outputs: bool) -> str | None:
        parts, setup = self.parts, self._setup
        reasons = (
            (parts.in_shards, "the optimizer's state is in shards"),
            (parts.together, "several processes agree on each update"),
            (parts.modules[0].tree.ranks_meet, "ranks meet in synchronised layers"),
            (setup.accumulate > 1, _COLLECTS),
            (self.keeps_accumulating or parts.cycle.window.calls, _COLLECTS),
            (setup.error_if_nonfinite, "error_if_nonfinite=True waits for the gradients"),
            (self._split_plan.asked == "auto", 'shares="auto" takes the time of each rank'),
            (keep_outputs, "its outputs are returned"),
            (parts.updates.memory is None, "its optimizer is none of mgpu_core.optim, or has step hooks"),
        )
        for device in parts.replicas.devices:
            if device.type != GRAPH_DEVICE:
                return f"there are no CUDA graphs on {device}"
        for holds, reason in reasons:
            if holds:
                return reason
        return None

    def evaluate(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool, aux: bool) -> CallResult:
        """Return what :meth:`train` returns, without gradients and without an update."""
        passes = self._current_parts().passes
        cut, rows = passes.split(inputs, kwargs, self._split_plan.shares)
        with torch.no_grad():
            try:
                if passes.gathers:
                    loss, outputs = passes.run_gathered(cut, (), inputs[-1], 1.0, backward=False)
                    losses, rows = [loss], [sum(rows)]
                else:
                    losses, each = passes.run(cut, (), backward=False, keep_outputs=keep_outputs)
                    outputs = passes.joined(each) if each else None
            except BaseException:
                if self._ranks_have_ended():
                    self._broken = None
                raise
            return self._result(Window(self._setup.reduction, 1), rows, losses, outputs, aux)

    def _current_parts(self) -> Parts:
        """Return the parts for a call, made anew where the module has other parameters by now."""
        if self.parts.are_outdated():
            if self.parts.together is not None:
                raise RuntimeError(
                    "the parameters of the module are no longer those of this step: call step.rebuild() in all "
                    "processes"
                )
            if self.parts.cycle.window.calls:
                raise RuntimeError(
                    "the parameters of the module have become others while gradients were accumulated: call "
                    "step.flush() before, or step.rebuild(), which drops the gradients"
                )
            self.rebuild(check=False)
        self.parts.refresh()
        return self.parts

    def _conclude(self, standing: Standing) -> bool:
        self.parts.refresh()
        self.parts.follow_the_optimizer()
        self._enter()
        self.parts.sync.begin(0, overlap=False, streams=caller_streams(self._setup.team.devices))
        return self._update(standing)

    def _enter(self) -> None:
        """Before a call: the first of a window takes the settings, and the loss scale, as they are now."""
        if self.parts.cycle.window.calls == 0:
            self.parts.new_window()
        self.parts.cycle.enter()

    def _update(self, standing: Standing) -> bool:
        self.parts.replicas.settle()  # a forward may have assigned `parameter.data`
        there_was = self.parts.cycle.update(self._setup.clip_norm, bool(self._setup.error_if_nonfinite), standing)
        self.parts.new_window()
        return there_was is not None

    def _give_up(self, error: BaseException) -> None:
        """Waits for ranks that are still at work, and drops what the calls since the last update have left."""
        parts = self.parts
        parts.sync.cancel()
        if not self._ranks_have_ended():
            return
        broken = None
        if parts.together is not None:
            self._broken = "the other processes may not know that a step was given up"
            broken = parts.together.give_up(parts.sync, parts.cycle.steps, error)
        parts.cycle.restore()
        parts.new_window()
        self._broken = broken or parts.cycle.broken

    def _ranks_have_ended(self) -> bool:
        """Wait, after a failure, for ranks that are still at work; where one does not end, the step is broken."""
        seconds = time_limit()
        self._broken = "a rank may still be at work in a step that was given up"  # until we know: Ctrl-C may come again
        if not self.parts.passes.stop(seconds):
            self._broken = f"a rank was still at work {seconds:g} s after its step had failed"
            return False
        return True

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state, and its counts; raises as :meth:`mgpu_core.TrainStep.load_state_dict`."""
        parts = self.parts
        self._load_everywhere(state)
        parts.cycle.steps = int(state["steps"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        self._split_plan.resume(state["shares"])
        self.choice.resume(state.get("workers", ()))
        parts.sync.abandon()
        parts.new_window()
        self._broken = "the processes have loaded other states"
        parts.agree(parts.cycle.steps)
        self._broken = None

    def _load_everywhere(self, state: Any) -> None:
        together = self.parts.together
        try:
            load_state(state, self._setup.module, self._setup.optimizer)
        except BaseException as error:
            if together is not None:
                together.check_all_well(error)
            raise
        if together is not None:
            together.check_all_well(None)

    def rebuild(self, *, check: bool = True) -> None:
        """Make all parts anew, from the module as it is; ``check``: that the optimizer has parameters of it alone."""
        hook, steps = self.parts.sync.between.hook, self.parts.cycle.steps
        check_place(self._setup.module, self._setup.team)
        if check:
            check_optimizer(self._setup.optimizer, dict(named_parameters_of(self._setup.module)))
        self._broken = "it could not be built"
        self.parts.leave()
        self.parts = Parts(self._setup, self._split_plan, self.choice, self.loss_scale, self._processes, steps)
        self.parts.sync.between.hook = hook
        self._broken = None
