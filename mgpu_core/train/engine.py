"""The order of a step, from a batch to an update: what :class:`mgpu_core.TrainStep` is the handle of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from mgpu_core.device.streams import caller_streams
from mgpu_core.device.workers import time_limit
from mgpu_core.errors import Error
from mgpu_core.module_tree import named_parameters_of
from mgpu_core.processes.ballot import Standing
from mgpu_core.processes.group import Processes
from mgpu_core.train.balance import SplitPlan
from mgpu_core.train.checkpoint import load_state
from mgpu_core.train.cuda_graphs import CapturedSteps
from mgpu_core.train.forward_backward import seed
from mgpu_core.train.grad_scaler import LossScale
from mgpu_core.train.graph_cache import GRAPH_DEVICE
from mgpu_core.train.loss import Window
from mgpu_core.train.options import Setup, check_place
from mgpu_core.train.parts import Parts
from mgpu_core.train.updates import check_optimizer

__all__ = ["Engine"]

_T = TypeVar("_T")
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
        keeps_accumulating: no call updates.

    Raises:
        TypeError, ValueError, RuntimeError, Error: as for :class:`Parts`.
    """

    def __init__(self, setup: Setup, split_plan: SplitPlan, processes: Processes | None) -> None:
        self._setup, self._split_plan, self._processes = setup, split_plan, processes
        self.loss_scale = LossScale(setup.amp_dtype)
        self.keeps_accumulating = False
        self._broken: str | None = None
        self.parts = Parts(setup, split_plan, self.loss_scale, processes, steps=0)

    def check_whole(self) -> None:
        """Raises Error where a failure has left something that no further step can mend."""
        if self._processes is not None and self._processes.lost is not None:
            raise Error(self._processes.lost)
        if self._broken is not None:
            raise Error(f"{self._broken}: call step.rebuild(), or make a new one")

    def train(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool) -> tuple[torch.Tensor, Any]:
        """The loss of a batch, and the outputs where they are kept; all of it happens, or nothing, in all processes."""
        return self._whole(partial(self._train, inputs, kwargs, keep_outputs))

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

    def _train(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool) -> tuple[torch.Tensor, Any]:
        parts = self._current_parts()
        parts.follow_the_optimizer()
        if parts.captured is not None and parts.cycle.used:
            loss = self._replay(parts.captured, inputs, kwargs, keep_outputs)
            if loss is not None:
                return loss, None
        self._enter()
        is_last = not self.keeps_accumulating and parts.cycle.window.calls + 1 >= self._setup.accumulate
        self._split_plan.follow_the_clocks()
        loss, outputs = self._compute(inputs, kwargs, overlap=is_last, keep_outputs=keep_outputs)
        if is_last:
            self._update(Standing.TRAINS)
        else:
            parts.sync.set_aside()
        return loss, outputs

    def _compute(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, overlap: bool, keep_outputs: bool
    ) -> tuple[torch.Tensor, Any]:
        """Forward, loss and backward of all ranks."""
        window, devices = self.parts.cycle.window, self._setup.team.devices
        cut, rows = self.parts.passes.split(inputs, kwargs, self._split_plan.shares)
        seed(cut, window.seeds(rows))
        self.parts.sync.begin(len(cut), overlap=overlap, streams=caller_streams(devices))
        clocks = self._split_plan.clocks()
        with torch.enable_grad():
            losses, outputs = self.parts.passes.run(cut, clocks, backward=True, keep_outputs=keep_outputs)
        self._split_plan.done(rows, clocks)
        return window.add(rows, losses, devices[0]), outputs

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

    def evaluate(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool) -> tuple[torch.Tensor, Any]:
        """What :meth:`train` returns, without gradients and without an update."""
        passes = self._current_parts().passes
        cut, rows = passes.split(inputs, kwargs, self._split_plan.shares)
        with torch.no_grad():
            try:
                losses, outputs = passes.run(cut, (), backward=False, keep_outputs=keep_outputs)
            except BaseException:
                if self._ranks_have_ended():
                    self._broken = None
                raise
            return Window(self._setup.reduction, 1).add(rows, losses, self._setup.team.devices[0]), outputs

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
        """After a failure: waits for those that are still at work, and takes back what they have put elsewhere.

        Where one does not end, the step is broken.
        """
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
        self.parts = Parts(self._setup, self._split_plan, self.loss_scale, self._processes, steps)
        self.parts.sync.between.hook = hook
        self._broken = None
