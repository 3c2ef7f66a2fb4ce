"""The parts of a step, made from the module as it is; :class:`mgpu_core.TrainStep` says in which order they work."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from mgpu_core.devices.time_limits import time_limit
from mgpu_core.errors import Error
from mgpu_core.parallel.first_calls import Call, FirstCalls
from mgpu_core.parallel.first_calls.labels import LABELLED, OF_A_STEP, Labels
from mgpu_core.pipeline.module import Pipeline
from mgpu_core.ranks.random import random_numbers_kept
from mgpu_core.step.checkpoint import load_state
from mgpu_core.step.cuda_graphs import CapturedSteps
from mgpu_core.step.forward_backward import ForwardBackward, RankPart
from mgpu_core.step.grad_buckets import Communication
from mgpu_core.step.grad_scaler import LossScale
from mgpu_core.step.loss import RankLoss, Window, joined_aux, loss_of_ranks
from mgpu_core.step.loss_check import (
    LossCheck,
    LossState,
    compare_losses,
    warning_of,
    warning_of_side,
    warning_of_state,
)
from mgpu_core.step.loss_weights import LossWeights
from mgpu_core.step.optimizer_step import OptimizerStep, check_optimizer
from mgpu_core.step.options import Options, check_device
from mgpu_core.step.pipeline_passes import PipelinePasses
from mgpu_core.step.process_sums import ProcessSums
from mgpu_core.step.rank_modules import RankModules
from mgpu_core.step.reducer import Gradients, OwnGradients, Reducer
from mgpu_core.step.replicas import Replicas
from mgpu_core.step.rollback import BufferSnapshot
from mgpu_core.step.split_plan import SplitPlan
from mgpu_core.step.update import Update
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.module_tree import named_parameters_of, parameters_of
from mgpu_core.trees.nested import moved

__all__ = ["StepParts"]

Result: TypeAlias = tuple[torch.Tensor, Any, dict[str, torch.Tensor]]  # loss, outputs, further numbers


class StepParts:
    """The parts of a step.

    They are made from the module as it is, and made anew by :meth:`rebuild`.

    Args:
        options: the arguments of the step.
        split_plan: which rank gets which rows.
        processes: the sums over all processes; ``None``: there are no others.

    Attributes:
        options, split_plan: the same.
        loss_scale: of float16.
        communication: how gradients are summed; a hook of the user's outlives a rebuild.
        keeps_accumulating: no call updates.
        replicas, modules, net, gradients, optimizer_step, passes, update: see their classes.
        captured: ``None`` without ``capture=True``.
        device: the first one.
        calls: how many steps were begun.
        checks_losses: losses of calls 1, 2, 4, 8 ... are compared with the loss of all rows: they may differ later.
        first_calls: those whose labels are looked at.
        refusal: the error with which a step is refused; ``None``: one can be made.

    Raises:
        TypeError, ValueError, RuntimeError: a module or an optimizer that no step can have.
    """

    def __init__(self, options: Options, split_plan: SplitPlan, processes: ProcessSums | None) -> None:
        self.options, self.split_plan, self._processes = options, split_plan, processes
        team, devices = options.team, set(options.team.devices)
        self.device = team.devices[0]
        self.loss_scale = LossScale(options.amp_dtype)
        self.in_shards = options.shard_optimizer and len(devices) > 1
        self.communication = Communication(options, len(devices) if self.in_shards else 1, processes)
        self.keeps_accumulating = False
        has_parts = len(team) > 1 or isinstance(options.module, Pipeline)
        is_exact = options.loss_fn is None or LossWeights(options.loss_fn).are_exact
        self.calls, self.checks_losses = 0, has_parts and options.loss_on == "ranks" and not is_exact
        is_mean = options.loss_fn is None and options.reduction == "mean"
        labels = [(Labels(OF_A_STEP), LABELLED)] if has_parts and is_mean else []
        self.first_calls = FirstCalls(*labels)
        self.refusal: tuple[type[Exception], str] | None = None
        self._is_closed = self._is_built = False
        self._build(steps=0)

    def _build(self, steps: int) -> None:
        """Make the parts from the module as it is, after so many updates."""
        options, processes, team = self.options, self._processes, self.options.team
        if processes is not None:
            processes.check_alike(options.shared())
            self._send_values(processes)
        self.replicas = Replicas(options.module, team)
        static = options.static_graph or options.capture
        self.net = RankModules(options.module, team, self.replicas.parameters, static=static)
        loss = loss_of_ranks(options.loss_fn, team, static=static)
        self.modules = [self.net, *([loss] if isinstance(loss, RankModules) else [])]
        tree = self.net.tree
        if options.workers == "caller" and tree.ranks_meet and len(team) > 1:
            raise ValueError(
                'workers="caller" runs the ranks one after the other, and those of this module meet in synchronised '
                'layers: use workers="threads" or "auto"'
            )
        is_alone = len(team) == 1 and processes is None and not options.capture
        reducer = None if is_alone else Reducer(self.replicas, self.communication)
        self.gradients: Gradients = reducer or OwnGradients(self.replicas)
        self.optimizer_step = OptimizerStep(options.optimizer, self.replicas, self.gradients, self.in_shards)
        # Ranks that share a GPU take turns where a graph is recorded on their stream; those that meet have no graphs.
        rng = "turns" if options.capture and not tree.ranks_meet else options.rng
        parts = options, self.replicas, self.net, loss, rng, self.split_plan
        self.passes = ForwardBackward(*parts)
        if isinstance(options.module, Pipeline):
            self.passes = PipelinePasses(options.module, *parts)
        self.update = Update(
            self.replicas, self.gradients, self.optimizer_step, self.loss_scale, processes,
            BufferSnapshot(self.modules), steps,
        )  # fmt: skip
        self.captured: CapturedSteps | None = None
        if options.capture and reducer is not None:
            self.captured = CapturedSteps(options, reducer, self.passes, self.update, self.modules)
        self._is_built = True

    def _send_values(self, processes: ProcessSums) -> None:
        """Give all processes the parameters and buffers of process 0."""
        module = self.options.module
        processes.send_values([*parameters_of(module), *module.buffers()])

    def evaluate(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool, aux: bool) -> Result:
        """Return the same as a step, without gradients and without an update."""
        self.follow_module(updates=False)
        parts, rows = self.passes.split(inputs, kwargs)
        with torch.no_grad():
            try:
                losses, rows, outputs = self.passes.run(None, parts, rows, inputs, keep_outputs)
            except BaseException:
                if self._ranks_have_ended():
                    self._refuse_if(None)
                raise
            reduction = self.options.reduction
            loss = Window(reduction, 1).add(rows, losses, self.device)
            return loss, outputs, joined_aux(losses, rows, reduction) if aux else {}

    def check_loss(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCheck:
        """Compare the loss of the gathered outputs with the sum of the ranks' on a batch; nothing is changed."""
        loss_fn = self.options.loss_fn
        if loss_fn is None or self.passes.gathers:
            return LossCheck(None, reason="there is no loss function that is called per rank")
        self.follow_module(updates=False)
        parts, rows = self.passes.split(inputs, kwargs)
        if len(parts) < 2:
            return LossCheck(None, reason="one rank has all rows")
        buffers, state = BufferSnapshot(self.modules), self.passes.watch_loss(parts[0])
        buffers.take()
        try:
            with torch.no_grad(), random_numbers_kept(self.replicas.devices):
                losses, _, outputs = self.passes.run_apart(None, parts, rows, inputs, True)
                return self._judge(state, outputs, inputs[-1], losses, rows)
        finally:
            buffers.restore()

    def watched(
        self, window: Window, parts: list[RankPart], rows: list[int], inputs: tuple[Any, ...], keep_outputs: bool
    ) -> tuple[list[RankLoss], list[int], Any]:
        """Run as :meth:`ForwardBackward.run`, and look at the labels and the losses of some calls."""
        if self.first_calls.go_on:
            arguments = [(part.inputs, part.kwargs) for part in parts]
            self.first_calls.end(self.first_calls.begin(Call(self.options.module, arguments=arguments, rows=rows)))
        if not self.checks_losses or self.calls & (self.calls - 1) or len(parts) == 1:
            return self.passes.run(window, parts, rows, inputs, keep_outputs)
        state = self.passes.watch_loss(parts[0])
        losses, weighed, rank_outputs = self.passes.run_apart(window, parts, rows, inputs, True)
        outputs = self.passes.joined(rank_outputs, rows) if keep_outputs else None
        check = self._judge(state, rank_outputs, inputs[-1], losses, rows)
        if check.agrees is False or state.own or state.side:  # otherwise a later call may say more
            self.checks_losses = False
        return losses, weighed, outputs

    def _judge(
        self, state: LossState, outputs: list[Any], target: Any, losses: list[RankLoss], rows: list[int]
    ) -> LossCheck:
        """Compare the losses of a call with the loss of all its rows, and warn where they differ.

        A loss that keeps a state, or reads objects that forwards change, is not called again.
        """
        options, device = self.options, self.device
        assert options.loss_fn is not None  # without one nothing is checked
        if state.own:
            warn_user(warning_of_state(state, len(losses)))
            return LossCheck(None, reason="the loss keeps a state of its own")
        if state.side:
            if self.passes.workers.way == "threads":
                warn_user(warning_of_side(state, gathers=False))
            return LossCheck(None, reason="the loss reads what the forwards change")
        with self.passes.autocast(device):
            check = compare_losses(
                options.loss_fn, outputs, moved(target, device), losses, rows, options.reduction, self.passes.weights,
                dim=options.dim, is_half=options.amp_dtype is not None,
            )  # fmt: skip
        if check.agrees is False:
            warn_user(warning_of(check))
        return check

    def replay(
        self, captured: CapturedSteps, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool
    ) -> torch.Tensor | None:
        """Return the loss of a step that was the replay of a graph; ``None``: it must go the ordinary way."""
        options = self.options
        collects = options.accumulate > 1 or self.keeps_accumulating or self.update.window.calls > 0
        reason, loss = captured.why_not(options, collects=collects, keep_outputs=keep_outputs), None
        if reason is None:
            loss = captured.run(inputs, kwargs, options.clip_norm)
        else:
            captured.graphs.skip(reason)
        if loss is None:
            captured.graphs.tell()
        else:
            self.update.close()
        return loss

    def follow_module(self, *, updates: bool) -> None:
        """Bring all ranks up to the module as it is now; a module with other parameters has everything made anew.

        Args:
            updates: the call is a step, and not an evaluation.
        """
        for modules in self.modules:
            if modules.is_static or not modules.tree.is_current():
                modules.read()
        if not self._is_built or not self.replicas.are_those_of(self.net.tree):
            if self._processes is not None:
                raise RuntimeError(
                    "the parameters of the module are no longer those of this step: call step.rebuild() in all "
                    "processes"
                )
            if self.update.window.calls:
                raise RuntimeError(
                    "the parameters of the module have become others while gradients were accumulated: call "
                    "step.flush() before, or step.rebuild(), which drops the gradients"
                )
            self.rebuild(check=False)
        if self.gradients.buckets is not None:
            self.follow_parameters(updates=updates)

    def follow_parameters(self, *, updates: bool = False) -> None:
        """Copy changes that the user made to parameters since the last call to all ranks.

        Args:
            updates: an update follows, by which parameters may have to be in a bucket.

        Raises:
            RuntimeError: a parameter must be in a bucket by now, and several processes cannot lay out again.
        """
        buckets = self.gradients.buckets
        if buckets is None:
            return
        if self.replicas.follow():
            self.gradients.register_hooks()
        if self.replicas.have_left:
            self._lay_out_anew()
            return
        if self.optimizer_step.has_copies and (changed := self.optimizer_step.values_changed()):
            self.replicas.send_values(changed)
            self.optimizer_step.remember_values()
        may_add = updates and buckets.left_out
        name = buckets.parameter_to_add(self.optimizer_step.parameters) if may_add else None
        if name is None:
            return
        if self._processes is not None:
            raise RuntimeError(
                f"parameter {name} was frozen, and none of the optimizer's, when the processes made this step, and is "
                "trained now: call step.rebuild() in all processes"
            )
        self._lay_out_anew()

    def _lay_out_anew(self) -> None:
        """Make the next update as the first one was made."""
        if self.captured is not None:
            self.captured.graphs.clear()
        self.update.forget_layout()

    def make_equal(self) -> None:
        """Give all devices the values of the module, and all processes those of process 0."""
        if self._processes is not None:
            self._send_values(self._processes)
        self.replicas.send_values()
        self.optimizer_step.remember_values()

    def _refuse_if(self, broken: str | None) -> None:
        """Keep why no further step can be made: ``broken``, or a failure between processes, or the end."""
        if self._is_closed:
            self.refusal = RuntimeError, "this step was closed"
        elif self._processes is not None and self._processes.broken is not None:
            self.refusal = Error, self._processes.broken
        else:
            self.refusal = None if broken is None else (Error, f"{broken}: call step.rebuild(), or make a new one")

    def give_up(self) -> None:
        """Wait for ranks that are still at work, and drop the gradients of the calls since the last update."""
        self.gradients.cancel()
        if not self._ranks_have_ended():
            return
        if self._processes is not None:
            self._processes.abandon()
        self.update.restore()
        self._refuse_if(self.update.broken)

    def _ranks_have_ended(self) -> bool:
        """Wait, after a failure, for ranks that are still at work; where one does not end, the step is broken."""
        seconds = time_limit()
        self._refuse_if("a rank may still be at work in a step that was given up")  # Ctrl-C may come again
        have_ended = self.passes.stop(seconds)
        if not have_ended:
            self._refuse_if(f"a rank was still at work {seconds:g} s after its step had failed")
        return have_ended

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state, and its counts; raise as :meth:`mgpu_core.TrainStep.load_state_dict`."""
        load_state(state, self.options.module, self.options.optimizer)
        self.update.steps = int(state["steps"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.split_plan.resume(state["shares"])
        self.gradients.abandon()
        self.update.close()

    def rebuild(self, *, check: bool = True) -> None:
        """Make everything anew, from the module as it is; ``check``: that the optimizer has parameters of it alone."""
        if self._is_closed:
            raise RuntimeError("this step was closed")
        options, steps = self.options, self.update.steps
        check_device(options.module, options.team)
        if check:
            check_optimizer(options.optimizer, dict(named_parameters_of(options.module)))
        self._refuse_if("it could not be built")
        self._is_built = False  # until all of it is: a failure in between makes the next call build again
        self._leave()
        self._build(steps)
        self._refuse_if(None)

    def close(self) -> None:
        """Give module and optimizer memory of their own again; no further step can be made."""
        if not self._is_closed:
            self._is_closed = True
            self._refuse_if(None)
            self._leave()

    def _leave(self) -> None:
        if self.captured is not None:
            self.captured.graphs.clear()
            self.captured.recorder.forget()
        self.gradients.close()
        self.optimizer_step.leave()
        self.replicas.release()
