"""``TrainStep``: split, forward, loss, backward, all-reduce and update in one call, over several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim import Optimizer

from mgpu_core._core import ReentrancyGuard
from mgpu_core.comm.buckets import DEFAULT_NBYTES
from mgpu_core.devices.devices import DeviceLike, as_devices
from mgpu_core.errors import Error
from mgpu_core.ranks.compiled import outside_the_compiler
from mgpu_core.step.arguments import check_device, check_optimizer, checked_options, warn_of_options
from mgpu_core.step.checkpoint import first_difference, load_state, state_of
from mgpu_core.step.cuda_graphs import captured_steps
from mgpu_core.step.cut_gradients import gradients_of
from mgpu_core.step.forward_backward import way_to_pass
from mgpu_core.step.grad_buckets import CommHook, Communication
from mgpu_core.step.grad_scaler import LossScale
from mgpu_core.step.graph_cache import StepGraphs
from mgpu_core.step.loss_check import LossCheck
from mgpu_core.step.loss_watch import LossWatch
from mgpu_core.step.options import ARGUMENTS
from mgpu_core.step.pipeline_passes import passes_of
from mgpu_core.step.process_sums import ProcessSums
from mgpu_core.step.ranks import Ranks
from mgpu_core.step.split_plan import SplitPlan, StepPlan
from mgpu_core.step.standing import Standing
from mgpu_core.step.update import Update
from mgpu_core.step.window import Window, joined_aux
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["TrainStep"]

_NOT_SHOWN = ("process_group", "error_if_nonfinite")  # which do not keep their default
_Result: TypeAlias = tuple[torch.Tensor, Any, dict[str, torch.Tensor]]  # loss, outputs, further numbers


class TrainStep:
    """One training step over several ranks: ``loss = step(x, y)``.

    Each rank runs the module as it is at the call on its part of the rows: forward, loss, backward.  Rank 0 runs
    ``net`` itself, the others replicas made for the call, whose parameters live on.  Gradients are summed bucket by
    bucket while backward goes on, and the optimizer updates each device once.  The numbers are one device's: the loss,
    the gradients and the parameters, for every split of the rows.  One rank costs about as much as a bare loop: no
    thread, no scatter, and gradients stay where autograd makes them.

    Args:
        net: the module to train, on ``device_ids[0]`` (moved there if there is one device).  Its parameters are current
            after every step.
        loss_fn: ``loss_fn(output, target)``, a tensor of one element; ``None``: the module returns the loss itself.
            A module is moved to the first device; its buffers (class weights) and modes are followed, as those of
            ``net`` are.
        optimizer: any ``torch.optim.Optimizer`` over parameters of ``net``.  Those of :mod:`mgpu_core.optim` update all
            devices by one kernel per bucket; any other makes its own ``step()`` once, on the first device, and the
            others get the values.
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`; ``None``: all accelerators (of several
            processes that ``torchrun`` has started here, each takes its part), else as many CPU ranks as
            ``MGPU_CORE_CPU_RANKS`` says, else the module's own device.  A :class:`mgpu_core.Pipeline` runs on its
            own.
        process_group: of ``torch.distributed``, whose processes train together, each with a team and rows of its own:
            the numbers are those of one device with all rows of all processes.  All of them make the step at the same
            time, get the values of process 0, and make as many calls as each other, with empty batches if need be.

    Args for the rows:
        dim: the dimension of the rows.
        shares: rows in this proportion, one positive number per rank; ``"auto"``: in proportion to the ranks' speeds,
            measured over the first steps, as far as their memory goes (see :meth:`plan`).

    Args for the loss:
        reduction: how ``loss_fn`` combines its rows: ``mean``; ``sum``; or ``weighted``: it returns
            ``(sum, weight)``, and the team's sum is divided by the team's weight (``ignore_index``, class weights); a
            weight of 0 makes the gradient 0.
        loss_on: ``ranks``: each rank computes the loss of its own rows, which the first step checks (see
            :meth:`check_loss`); ``gathered``: the loss is computed once, on the outputs of all ranks, as for a loss
            that compares rows with each other.
        amp_dtype: run forward and loss under autocast in this dtype, ``torch.bfloat16`` or ``torch.float16``; float16
            with a loss scale that adapts: an update whose gradients overflow is skipped on all ranks.

    Args for the update:
        accumulate: calls per update; their gradients count as one batch's.
        clip_norm: the largest norm that the gradient of all parameters may have; a larger one is scaled down.
        error_if_nonfinite: raise ``FloatingPointError`` instead of updating by a NaN or infinite gradient; ``None``:
            where that needs no wait, on the CPU.
        shard: ``"optimizer"``: each device keeps the optimizer's state of its part of each bucket alone, and updates
            that: an N-th of the memory, the same numbers.  ``"parameters"``: so it does with values and gradients; a
            block of the module has memory while it runs, forward and backward, and the rest during the call.  Between
            calls the parameters of ``net`` are there inside :meth:`full_parameters` alone.  ``net`` may lie on the
            CPU, or on meta (:meth:`load_weights`).  For :mod:`mgpu_core.optim`; gradients are not shown then.

    Args for the sums of gradients:
        bucket_nbytes: how many bytes of gradients are summed together.
        comm_dtype: the dtype of gradients in transit between devices.  Ranks of one device send nothing.
        algorithm: of the all-reduce between devices, as in :func:`mgpu_core.comm.all_reduce`.

    Args for how ranks run:
        workers: ``threads``: each rank in a thread of its own; ``caller``: one after the other in the caller's thread;
            ``auto``: threads where each rank has an accelerator of its own, otherwise the caller's thread (see
            :meth:`plan`).
        rng: as for :class:`mgpu_core.DataParallel`.
        static_graph: make the replicas once; of later changes of the module only modes, frozen parameters and values
            are followed.
        capture: record steps as CUDA graphs and replay them: one launch per GPU, besides the sums over GPUs and the
            update.  Shapes that change are recorded anew after a few ordinary steps; a step that cannot be captured
            runs the ordinary way, and a warning says why, once.  ``step.graphs`` knows how many steps were replays.

    After a step, ``grad`` of the parameters holds the gradients of the update, with :mod:`mgpu_core.optim` the sums
    before clipping and unscaling; of a parameter that no rank used it is ``None``, and the optimizer leaves that
    parameter alone.  Running statistics are those of rank 0's rows.  Hooks on parameters (``register_hook``) are called
    once per call, on the sum over all ranks.

    The arguments are attributes (``net`` is ``module``, and ``team`` has the devices).  ``accumulate``, ``clip_norm``,
    ``error_if_nonfinite`` and ``shares`` may be set to other values, for the calls to come; the others stay.

    Raises:
        TypeError, ValueError: arguments that do not fit together, before anything is changed.
    """

    def __init__(
        self,
        net: torch.nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Optimizer,
        device_ids: Sequence[DeviceLike] | Sequence[Sequence[DeviceLike]] | None = None,
        *,
        process_group: ProcessGroup | None = None,
        dim: int = 0,
        shares: Sequence[float] | str | None = None,
        reduction: str = "mean",
        loss_on: str = "ranks",
        amp_dtype: torch.dtype | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        error_if_nonfinite: bool | None = None,
        shard: str | None = None,
        bucket_nbytes: int = DEFAULT_NBYTES,
        comm_dtype: torch.dtype | None = None,
        algorithm: str = "auto",
        workers: str = "auto",
        rng: str = "auto",
        static_graph: bool = False,
        capture: bool = False,
    ) -> None:
        options = checked_options(
            net,
            loss_fn,
            optimizer,
            device_ids,
            has_processes=process_group is not None,
            dim=dim,
            reduction=reduction,
            loss_on=loss_on,
            amp_dtype=amp_dtype,
            accumulate=accumulate,
            clip_norm=clip_norm,
            error_if_nonfinite=error_if_nonfinite,
            shard=shard,
            bucket_nbytes=bucket_nbytes,
            comm_dtype=comm_dtype,
            algorithm=algorithm,
            workers=workers,
            rng=rng,
            static_graph=static_graph,
            capture=capture,
        )
        team = options.team
        self._split_plan = SplitPlan(shares, team)
        check_device(net, team, options.shard)
        self._guard = ReentrancyGuard("this step is already running: one call at a time, not one inside another")
        self._processes = None if process_group is None else ProcessSums(process_group, team.devices[0])
        self._options, self._loss_scale = options, LossScale(amp_dtype)
        self._communication = Communication(options, self._processes)  # a hook in it outlives a rebuild
        self._keeps_accumulating = False
        self._standing = Standing(self._processes)
        self._build(steps=0)
        self._watch = LossWatch(options, is_exact=self._passes.losses.are_exact)
        warn_of_options(options)

    def _build(self, steps: int) -> None:
        """Make the parts from the module as it is, after so many updates."""
        options, processes, self._is_built = self._options, self._processes, False
        if processes is not None:
            processes.check_alike(options.shared())
            processes.send_module(options.module)
        self._ranks = Ranks(options)
        try:
            self._gradients = gradients_of(self._ranks, self._communication)
            self._passes = passes_of(options, self._ranks, self._split_plan)
            self._update = Update(
                options.optimizer, self._ranks, self._gradients, self._communication, self._loss_scale, steps
            )
        except BaseException:
            self._ranks.replicas.release()
            raise
        self._captured = captured_steps(options, self._gradients, self._passes, self._update)
        self._is_built = True

    def __getattr__(self, name: str) -> Any:
        if name in ARGUMENTS:
            return getattr(self._options, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ARGUMENTS:
            self._options = self._options.changed(name, value)
        else:
            object.__setattr__(self, name, value)

    @property
    def loss_scale(self) -> LossScale:
        """The scale of the loss, of float16; 1 without."""
        return self._loss_scale

    @property
    def steps(self) -> int:
        """How many updates were made so far."""
        return self._update.steps

    @property
    def updated(self) -> bool:
        """Tell whether the last call, or :meth:`flush`, made an update.

        Not in the middle of an ``accumulate`` window, where a float16 gradient overflowed, and after an error.
        """
        return self._update.is_made

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The Euclidean norm of the last update's gradient, before clipping: a scalar on the first device.

        ``None`` before the first update, and after an error or an update that was skipped.  The host waits where it
        reads the number.  It is computed when it is read, and after the first time with each update; also with each
        update where the optimizer writes the gradients, as torch's SGD with ``nesterov`` does on a GPU.

        Raises:
            RuntimeError: it was never read before, and the gradients are gone or were changed, by ``zero_grad``,
                clipping or a later call.
        """
        return self._update.grad_norm()

    @property
    def shares(self) -> Sequence[float] | str | None:
        """The shares as given; a new value counts from the next call on.  Raise ValueError if no step can have it."""
        return self._split_plan.asked

    @shares.setter
    def shares(self, shares: Sequence[float] | str | None) -> None:
        self._split_plan.use(shares)

    @property
    def graphs(self) -> StepGraphs | None:
        """The steps that were captured; ``None`` without ``capture=True``."""
        return None if self._captured is None else self._captured.graphs

    @outside_the_compiler
    def __call__(self, *inputs: Any, return_outputs: bool = False, aux: bool = False, **kwargs: Any) -> Any:
        """Make one step on a batch.

        Args:
            inputs: the arguments of ``net``, and last the target (any nest; there is none with ``loss_fn=None``); cut
                along ``dim`` into one part per rank.
            return_outputs: return ``(loss, outputs)``.
            aux: return ``(loss, numbers)``, or ``(loss, outputs, numbers)``: the further numbers that ``loss_fn`` gave.
            kwargs: for ``net``, cut like the inputs.

        Returns:
            The loss of the batch as one device would have it: a fresh scalar on the first device, without a graph.
            With ``return_outputs`` also the outputs, joined on the first device, without a graph.

        Raises:
            ValueError, TypeError: inputs that do not fit together; a loss that is not one number.
            RuntimeError: parameters of ``net`` were moved or replaced.
            FloatingPointError: a gradient is not finite (see ``error_if_nonfinite``).
            Exception: a rank raised it; worded by :func:`mgpu_core.parallel_apply`.  Then, and at Ctrl-C,
                everything is as after the last update: gradients of the calls since are dropped, buffers are put back.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a step inside torch.inference_mode() has no gradients to train with")
        with self._guard, tracer.span("train_step") if tracer.sink else NULL_CONTEXT:
            loss, outputs, numbers = self._step(inputs, kwargs, return_outputs, aux)
        return _returned(loss, outputs, numbers, return_outputs, aux) if return_outputs or aux else loss

    def _step(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], return_outputs: bool, aux: bool) -> _Result:
        """Make a step; all of it happens, or nothing."""
        if self._standing.refusal is not None:
            self._standing.check()
        self._update.is_made = False
        try:
            self._follow_module(updates=True)
            options, passes, update, gradients = self._options, self._passes, self._update, self._gradients
            collects = self._keeps_accumulating or update.window.calls + 1 < options.accumulate
            if self._captured is not None and update.used:
                keeps = return_outputs or aux
                replayed = self._captured.run(options, inputs, kwargs, collects=collects, keep_outputs=keeps)
                if replayed is not None:
                    return replayed, None, {}
            window = update.begin(options)
            window.is_whole &= not self._keeps_accumulating
            if self._split_plan.is_timed:
                self._split_plan.follow_the_clocks()
            parts, rows = passes.split(inputs, kwargs)
            gradients.begin(len(parts), overlap=not collects, goes_on=window.calls > 0)
            if self._watch.is_on:
                losses, weighed, rank_outputs = self._watch.run(passes, window, parts, rows, inputs, return_outputs)
            else:
                losses, weighed, rank_outputs = passes.run(window, parts, rows, inputs, return_outputs)
            outputs = passes.joined(rank_outputs, rows) if return_outputs else None
            loss = window.add(weighed, losses, options.team.devices[0])
            if gradients.hooks is not None:
                gradients.call_hooks(window.hook_factor())
            numbers = joined_aux(losses, weighed, options.reduction) if aux else {}
            if collects:
                gradients.set_aside()
            else:
                update.commit(options, losses)
            return loss, outputs, numbers
        except BaseException as error:
            self._standing.give_up(self._ranks, self._gradients, self._update)
            hint = "" if kwargs else way_to_pass(inputs)
            if isinstance(error, TypeError | AttributeError) and hint not in str(error):
                error.add_note(hint)
            self._ranks.explain(error)
            raise

    def _follow_module(self, *, updates: bool) -> None:
        """Bring all ranks up to the module as it is now; a module with other parameters has everything made anew.

        Args:
            updates: the call is a step, and not an evaluation.
        """
        if not self._ranks.follow() or not self._is_built:
            if self._processes is not None:
                raise RuntimeError(
                    "the parameters of the module are no longer those of this step: call step.rebuild() in all "
                    "processes"
                )
            if self._update.window.calls:
                raise RuntimeError(
                    "the parameters of the module have become others while gradients were accumulated: call "
                    "step.flush() before, or step.rebuild(), which drops the gradients"
                )
            self._rebuild()
        if self._gradients.buckets is not None:
            self._follow_parameters(updates=updates)

    def _follow_parameters(self, *, updates: bool = False) -> None:
        """Copy changes of parameters to all ranks; recordings of another layout go."""
        if self._update.follow(updates=updates) and self._captured is not None:
            self._captured.graphs.clear()

    def plan(self) -> StepPlan:
        """Return the plan of each rank: its device, share of the rows, rows in the last call, how it runs, and why."""
        return self._split_plan.table(self._ranks.workers)

    def evaluate(self, *inputs: Any, return_outputs: bool = False, aux: bool = False, **kwargs: Any) -> Any:
        """Return the loss of a batch, without gradients and without an update; arguments and results as for a step.

        The module is used as it is: call ``net.eval()`` before.
        """
        with self._guard:
            self._standing.check()
            with tracer.span("evaluate"):
                loss, outputs, numbers = self._evaluate(inputs, kwargs, return_outputs, aux)
        return _returned(loss, outputs, numbers, return_outputs, aux)

    def _evaluate(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool, aux: bool) -> _Result:
        self._follow_module(updates=False)
        parts, rows = self._passes.split(inputs, kwargs)
        with torch.no_grad():
            try:
                losses, weighed, rank_outputs = self._passes.run(None, parts, rows, inputs, keep_outputs)
                outputs = self._passes.joined(rank_outputs, rows) if keep_outputs else None
            except BaseException as error:
                if self._standing.have_ended(self._ranks):
                    self._standing.refuse(None)
                self._ranks.explain(error)
                raise
            loss = Window(self.reduction, 1).add(weighed, losses, self.team.devices[0])
            return loss, outputs, joined_aux(losses, weighed, self.reduction) if aux else {}

    def check_loss(self, *inputs: Any, **kwargs: Any) -> LossCheck:
        """Compare the loss of all rows of a batch together with the sum of the ranks' losses; warn where they differ.

        A loss that compares rows with each other (InfoNCE, Dice, an advantage that is normalised inside) is another
        loss where each rank computes it on its own rows.  The first step does the same by itself.  Nothing is changed:
        buffers and random numbers are put back.

        Args:
            inputs, kwargs: as for a step.

        Returns:
            Both numbers, and whether they agree; or why that could not be judged.
        """
        with self._guard:
            self._standing.check()
            if self.loss_fn is None or self._passes.gathers:
                return LossCheck(None, reason="there is no loss function that is called per rank")
            self._follow_module(updates=False)
            try:
                return self._watch.check(self._passes, inputs, kwargs)
            except BaseException:
                if self._standing.have_ended(self._ranks):
                    self._standing.refuse(None)
                raise

    def flush(self) -> bool:
        """Update by the calls since the last update, if there are any: at the end of an epoch, with ``accumulate``.

        Their gradient is divided by their own number of rows, as if so many had been planned.  Returns whether
        there were any.
        """
        with self._guard:
            self._standing.check()
            if not self._update.window.calls:
                return False
            with tracer.span("train_step"):
                try:
                    self._follow_parameters(updates=True)
                    self._gradients.begin(0, overlap=False, goes_on=True)
                    self._update.commit(self._options)
                except BaseException:
                    self._standing.give_up(self._ranks, self._gradients, self._update)
                    raise
        return True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the calls inside add their gradients up; the first call after it that may, updates by all of them."""
        before, self._keeps_accumulating = self._keeps_accumulating, True
        try:
            yield
        finally:
            self._keeps_accumulating = before

    def register_comm_hook(self, hook: CommHook | None) -> None:
        """Let ``hook(bucket)`` sum each bucket over the devices instead of the all-reduce; ``None`` takes it away.

        It is called with a :class:`GradientBucket` as soon as the bucket is ready, in the thread of a rank, while
        others are in their backward.  It leaves the same bits on all devices.  A team on one device sends nothing, and
        does not call it.

        Raises:
            RuntimeError: gradients are being accumulated.
        """
        if self._update.window.calls:
            raise RuntimeError("a communication hook changes between updates, not between calls that accumulate")
        self._communication.hook = hook

    @contextmanager
    def full_parameters(self, device: DeviceLike | None = None) -> Iterator[torch.nn.Module]:
        """Have the module whole inside: to look at it, to save it, to change values, which count from then on.

        With ``shard="parameters"`` its parameters have no memory between steps; without it they are whole anyway, and
        stay where they are.

        Args:
            device: where they are whole, ``"cpu"`` if they do not fit on one device; ``None``: on the first device.

        Yields:
            ``net``.
        """
        with self._guard:
            self._standing.check()
            context = self._ranks.replicas.full(None if device is None else as_devices([device])[0])
            context.__enter__()
        try:
            yield self.module
        finally:
            context.__exit__(None, None, None)

    def load_weights(self, source: str | PathLike[str], rename: Callable[[str], str | None] | None = None) -> None:
        """Read parameters and buffers from files of safetensors; with ``shard="parameters"`` straight into the shards.

        The module may have been made inside :func:`mgpu_core.parameters_on_meta`, so that it never is whole.

        Args:
            source: a file, or a folder of files, such as ``save_pretrained`` writes.
            rename: as for :func:`mgpu_core.place`.

        Raises:
            FileNotFoundError, MissingExtra, ValueError: as for :func:`mgpu_core.place`, before anything is changed.
        """
        with self._guard:
            self._standing.check()
            self._ranks.replicas.load(source, rename)

    def sync_parameters(self) -> None:
        """Give all devices the values of ``net``: after writes through ``.data``, which torch does not count.

        With a ``process_group`` all processes call it, and get the parameters and buffers of process 0.
        """
        with self._guard:
            self._standing.check()
            if self._processes is not None:
                with self._ranks.replicas.full(None):
                    self._processes.send_module(self.module)
            self._ranks.replicas.send_values()
            self._update.optimizer_step.remember_values()

    def check_replicas(self) -> None:
        """Compare the parameters of all ranks bit by bit; waits for the devices.

        Values that were changed in place since the last step are sent to all devices first, as a step does.  With a
        ``process_group`` the ranks of this process are compared.

        Raises:
            Error: names the parameter and the rank that differs.
        """
        with self._guard:
            self._standing.check()
            self._follow_parameters()
            difference = first_difference(self._ranks.replicas)
        if difference is not None:
            name, rank = difference
            raise Error(
                f"parameter {name} of rank {rank} on {self.team.devices[rank]} differs from {self.team.devices[0]}'s: "
                "step.sync_parameters() makes them equal; something wrote to one device alone"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return compact copies of module, optimizer and random numbers, for a step of any number of ranks."""
        with self._guard:
            self._standing.check()
            counts: dict[str, Any] = {"steps": self.steps, "loss_scale": self.loss_scale.state_dict()}
            counts["shares"] = self._split_plan.measured()
            with self._ranks.replicas.full(self._ranks.replicas.host):
                return state_of(self.module, self.optimizer) | counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a state back that :meth:`state_dict` made; calls that were being accumulated are dropped.

        With a ``process_group`` all processes load the same state; nothing compares them.

        Raises:
            ValueError: a state that does not fit, before anything is changed.
        """
        with self._guard:
            self._standing.check()
            with self._ranks.replicas.full(self._ranks.replicas.host, sets_all=True):
                load_state(state, self.module, self.optimizer)
            self._update.steps = int(state["steps"])
            self._loss_scale.load_state_dict(state["loss_scale"])
            self._split_plan.resume(state["shares"])
            self._gradients.abandon()
            self._update.close()

    def rebuild(self) -> None:
        """Make all parts of the step anew from ``net`` as it is: after a failure, or with ``static_graph``."""
        with self._guard:
            self._standing.check_open()
            check_optimizer(self.optimizer, self.module)
            self._rebuild()

    def _rebuild(self) -> None:
        check_device(self.module, self.team, self.shard)
        self._standing.refuse("it could not be built")
        self._is_built = False  # until all of it is: a failure in between makes the next call build again
        self._leave(on_host=True)
        self._build(self._update.steps)
        self._standing.refuse(None)

    def close(self) -> None:
        """Give ``net`` and the optimizer memory of their own again, and ends the threads; the step is over."""
        with self._guard:
            if self._standing.close():
                self._leave()
            self.team.close()

    def _leave(self, *, on_host: bool = False) -> None:
        """Give module and optimizer memory of their own again: what has none, on the first device, or on the host."""
        if self._captured is not None:
            self._captured.graphs.clear()
            self._captured.recorder.forget()
        self._gradients.close()
        self._update.optimizer_step.leave()
        self._ranks.replicas.release(on_host=on_host)

    def __repr__(self) -> str:
        now = self._options
        names = ", ".join(map(str, self.team.devices))
        loss_fn = getattr(now.loss_fn, "__name__", type(now.loss_fn).__name__) if now.loss_fn else None
        others = [
            f"{name}={getattr(self, name)!r}"
            for name, param in signature(TrainStep).parameters.items()
            if param.kind is param.KEYWORD_ONLY and name not in _NOT_SHOWN and getattr(self, name) != param.default
        ]
        return (
            f"TrainStep({type(now.module).__name__}, {loss_fn}, {type(now.optimizer).__name__}, device_ids=[{names}], "
            f"updates={self.steps}{''.join(f', {each}' for each in others)})"
        )

    def __getstate__(self) -> Any:
        raise TypeError(
            "a TrainStep has threads and devices of its own, which cannot be copied or saved: save step.state_dict(), "
            "or make a new step of a copy of the module"
        )


def _returned(loss: Any, outputs: Any, numbers: Any, return_outputs: bool, aux: bool) -> Any:
    if not return_outputs and not aux:
        return loss
    return (loss, *([outputs] if return_outputs else []), *([numbers] if aux else []))
