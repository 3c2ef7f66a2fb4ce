"""``TrainStep``: split, forward, loss, backward, all-reduce and update in one call, on replicas that live on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from mgpu_core.comm.buckets import DEFAULT_NBYTES
from mgpu_core.device.compiled import outside_the_compiler
from mgpu_core.device.devices import DeviceLike
from mgpu_core.device.random import check_rng
from mgpu_core.device.streams import caller_streams
from mgpu_core.device.workers import time_limit
from mgpu_core.engine.between_devices import CommHook
from mgpu_core.engine.captured import CapturedSteps
from mgpu_core.engine.commit import Holder
from mgpu_core.engine.compare import first_difference
from mgpu_core.engine.cycle import Cycle
from mgpu_core.engine.gradients import GradientSync
from mgpu_core.engine.graphs import GRAPH_DEVICE, StepGraphs
from mgpu_core.engine.losses import Window
from mgpu_core.engine.passes import Passes
from mgpu_core.engine.rank_losses import RankLosses, check_loss
from mgpu_core.engine.ranks import seed
from mgpu_core.engine.replicas import Replicas
from mgpu_core.engine.scaling import LossScale
from mgpu_core.engine.settings import check_dtypes, check_module, check_place, check_settings, team_of
from mgpu_core.engine.shares import RankPlan, SplitPlan
from mgpu_core.engine.state import load_state, state_of
from mgpu_core.engine.together import Together
from mgpu_core.engine.updates import Updates, check_optimizer
from mgpu_core.errors import Error
from mgpu_core.processes.ballot import Standing
from mgpu_core.processes.group import Processes
from mgpu_core.record import span

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["TrainStep"]


class TrainStep:
    """One training step over several ranks: ``loss = step(x, y)``.

    Each rank has a module of its own, made once, and works in a thread of its own: forward on its rows, loss, backward.
    Gradients are summed bucket by bucket while backward goes on, and the optimizer updates each device once.  The
    numbers are one device's: the loss, the gradients and the parameters, for every split of the rows.

    Args:
        net: the module to train, on ``device_ids[0]`` (moved there if there is one device).  It is rank 0's, and its
            parameters are current after every step.
        loss_fn: ``loss_fn(output, target)``, a tensor of one element; ``None``: the module returns the loss itself.
            Buffers of a module (class weights) and its modes are followed, as those of ``net`` are.
        optimizer: any ``torch.optim.Optimizer`` over parameters of ``net``.  SGD, Adam and AdamW are run fused, torch's
            others by their own ``step()``, once per device; with step hooks, or of a class of your own, once, and the
            other devices get the values.  Schedulers, groups and ``state_dict()`` work as ever.
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`; ``None``: all accelerators (of several
            processes that ``torchrun`` has started here, each takes its part), else as many CPU ranks as
            ``MGPU_CORE_CPU_RANKS`` says, else the module's own device.
        dim: the dimension of the rows.
        shares: rows in this proportion, one positive number per rank; ``"auto"``: in proportion to the ranks' speeds,
            measured over the first steps, as far as their memory goes (see :meth:`plan`).
        reduction: what ``loss_fn`` does with its rows: ``mean``; ``sum``; or ``weighted``: it returns
            ``(sum, weight)``, and the team's sum is divided by the team's weight (``ignore_index``, class weights).
        accumulate: calls per update; their gradients count as one batch's.
        clip_norm: the largest norm that the gradient of all parameters may have; a larger one is scaled down.
        error_if_nonfinite: raise ``FloatingPointError`` instead of updating by a NaN or infinite gradient; ``None``:
            where that makes nobody wait, on the CPU.
        amp_dtype: run forward and loss under autocast in this dtype, ``torch.bfloat16`` or ``torch.float16``; float16
            with a loss scale that adapts: an update whose gradients overflow is skipped on all ranks.
        comm_dtype: what gradients are cast to for the way between devices.  Ranks of one device send nothing.
        bucket_nbytes: how many bytes of gradients are summed together.
        algorithm: of the all-reduce between devices, as in :func:`mgpu_core.comm.all_reduce`.
        shard_optimizer: each device keeps the optimizer's state of its part of each bucket alone, and updates that:
            an N-th of the memory, the same numbers.  For SGD, Adam and AdamW; gradients are not shown then.
        rng: as for :class:`mgpu_core.DataParallel`.
        capture: record whole steps as CUDA graphs and replay them: one launch per step where all ranks share one GPU;
            over several, two per GPU, and the sums between them in the ordinary way, behind all backwards.
            Shapes that change are recorded anew after a few ordinary steps; what cannot be captured goes the ordinary
            way, and a warning says why, once.  ``step.graphs`` knows how many steps were replays.
        process_group: of ``torch.distributed``, whose processes train together, each with a team and rows of its own:
            the numbers are those of one device with all rows of all processes.  All of them make a step at the same
            time, and get the values of process 0.

    After a step, ``grad`` of the parameters holds what the update used; of a parameter that no rank used it is
    ``None``, and the optimizer leaves that parameter alone.  Running statistics are those of rank 0's rows.  Hooks on
    parameters see each rank's own gradient.

    Raises:
        TypeError, ValueError: arguments that do not fit together, before anything is changed.
    """

    def __init__(
        self,
        net: Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Optimizer,
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        dim: int = 0,
        shares: Sequence[float] | str | None = None,
        reduction: str = "mean",
        accumulate: int = 1,
        clip_norm: float | None = None,
        error_if_nonfinite: bool | None = None,
        amp_dtype: torch.dtype | None = None,
        comm_dtype: torch.dtype | None = None,
        bucket_nbytes: int = DEFAULT_NBYTES,
        algorithm: str = "auto",
        shard_optimizer: bool = False,
        rng: str = "auto",
        capture: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        check_module(net)
        check_optimizer(optimizer, dict(net.named_parameters()))
        check_rng(rng)
        check_loss(loss_fn)
        check_settings(reduction, accumulate, clip_norm, algorithm, bucket_nbytes)
        check_dtypes(amp_dtype, comm_dtype, process_group)
        self.module, self.optimizer = net, optimizer
        self.team = team_of(net, device_ids)
        self._split_plan = SplitPlan(shares, self.team)
        check_place(net, self.team)
        self.dim, self.reduction = dim, reduction
        self.accumulate, self.clip_norm, self.rng = accumulate, clip_norm, rng
        self.shard_optimizer, self.capture = shard_optimizer, capture
        on_cpu = all(device.type == "cpu" for device in self.team.devices)
        self.error_if_nonfinite = on_cpu if error_if_nonfinite is None else error_if_nonfinite
        self.amp_dtype, self.loss_scale = amp_dtype, LossScale(amp_dtype)
        self._loss_fn = loss_fn
        self._sync_settings = bucket_nbytes, algorithm, comm_dtype
        self._holder = Holder()
        self._keeps_accumulating = False
        self._closed = False
        self._comm_hook: CommHook | None = None
        self._processes: Processes | None = None
        if process_group is not None:
            self._processes = Processes(process_group, self.team.devices[0])
        self._build(steps=0)

    def _build(self, steps: int) -> None:
        self._broken: str | None = "it could not be built"
        self._together: Together | None = None
        if self._processes is not None:
            self._together = Together(self._processes, self.module, self.optimizer)
            self._together.start(self._facts(steps))
        self._losses = RankLosses(self._loss_fn, self.team)
        self._replicas = Replicas(self.module, self.team)
        in_shards = self.shard_optimizer and len(self._replicas.devices) > 1
        self._sync = GradientSync(self._replicas, *self._sync_settings, in_shards, self._processes)
        self._sync.between.hook = self._comm_hook
        self._updates = Updates(self.optimizer, self._replicas, self._sync, in_shards)
        self._passes = Passes(
            self._replicas, self._losses, self.reduction, self.amp_dtype, self.rng, self.capture, self.dim
        )
        self._cycle = Cycle(
            self._replicas, self._sync, self._updates, self.loss_scale, self._together, steps, self._losses.modules
        )
        self._captured: CapturedSteps | None = None
        if self.capture:
            self._captured = CapturedSteps(
                self._replicas, self._sync, self._updates, self._passes, self._cycle, self._split_plan,
                self.loss_scale, self.reduction,
            )  # fmt: skip
        self._new_window()
        # A function over handles alone: what it holds, lives as long as the process.
        self._finalizer = weakref.finalize(self, _take_hooks_away, self._sync.handles, self._updates.handles)
        self._broken = None

    def _new_window(self) -> None:
        self._cycle.renew(self.reduction, self.accumulate)

    def _facts(self, steps: int) -> dict[str, Any]:
        """What all processes must have in common, besides net and optimizer."""
        names = ("reduction", "accumulate", "clip_norm", "error_if_nonfinite", "amp_dtype")
        own = {name: getattr(self, name) for name in names}
        sync = dict(zip(("bucket_nbytes", "algorithm", "comm_dtype"), self._sync_settings, strict=True))
        shards = len(set(self.team.devices)) if self.shard_optimizer else 1  # which the layout depends on
        return own | sync | {"shards": shards, "updates": steps, "loss scale": self.loss_scale.scale}

    @property
    def steps(self) -> int:
        """Updates so far."""
        return self._cycle.steps

    @property
    def shares(self) -> Sequence[float] | str | None:
        """As they were given; another value counts from the next call on.  ValueError for what no step can have."""
        return self._split_plan.asked

    @shares.setter
    def shares(self, shares: Sequence[float] | str | None) -> None:
        self._split_plan.use(shares)

    @property
    def graphs(self) -> StepGraphs | None:
        """What was captured; ``None`` without ``capture=True``."""
        return None if self._captured is None else self._captured.graphs

    @outside_the_compiler
    def __call__(self, *inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """One step on a batch.

        Args:
            inputs: what ``net`` takes, and last the target (any nest; there is none with ``loss_fn=None``); cut along
                ``dim`` into one part per rank.
            return_outputs: return ``(loss, outputs)``.
            kwargs: for ``net``, cut like the inputs.

        Returns:
            The loss of the batch as one device would have it: a fresh scalar on the first device, without a graph.
            With ``return_outputs`` also the outputs, joined on the first device, without a graph.

        Raises:
            ValueError, TypeError: inputs that do not fit together; a loss that is not one number.
            RuntimeError: parameters of ``net`` were moved or replaced.
            FloatingPointError: a gradient is not finite (see ``error_if_nonfinite``).
            Exception: what a rank raised, as :func:`mgpu_core.parallel_apply` words it.  Then, and at Ctrl-C,
                everything is as after the last update: gradients of the calls since are dropped, buffers are put back.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a step inside torch.inference_mode() has no gradients to train with")
        with self._used(), span("train_step"), self._whole():
            loss, outputs = self._train(inputs, kwargs, return_outputs)
        return (loss, outputs) if return_outputs else loss

    def _train(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool) -> tuple[Any, Any]:
        self._bring_up_to_date()
        if self._captured is not None and self._cycle.used:
            loss = self._replay(self._captured, inputs, kwargs, keep_outputs)
            if loss is not None:
                return loss, None
        self._enter()
        window = self._cycle.window
        is_last = not self._keeps_accumulating and window.calls + 1 >= self.accumulate
        self._split_plan.follow_the_clocks()
        loss, outputs = self._compute(inputs, kwargs, overlap=is_last, keep_outputs=keep_outputs)
        if is_last:
            self._update()
        else:
            self._sync.set_aside()
        return loss, outputs

    def _compute(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, overlap: bool, keep_outputs: bool
    ) -> tuple[torch.Tensor, Any]:
        """Forward, loss and backward of all ranks: the loss of the batch, and the outputs where they are kept."""
        window = self._cycle.window
        parts, rows = self._passes.split(inputs, kwargs, self._split_plan.shares)
        seed(parts, window.seeds(rows))
        self._sync.begin(len(parts), overlap=overlap, streams=caller_streams(self.team.devices))
        clocks = self._split_plan.clocks()
        with torch.enable_grad():
            losses, outputs = self._passes.run(parts, clocks, backward=True, keep_outputs=keep_outputs)
        self._split_plan.done(rows, clocks)
        return window.add(rows, losses, self.team.devices[0]), outputs

    def _replay(
        self, captured: CapturedSteps, inputs: tuple[Any, ...], kwargs: dict[str, Any], keep_outputs: bool
    ) -> torch.Tensor | None:
        """The loss of a step that was the replay of a graph; ``None``: it must go the ordinary way."""
        reason = self._why_no_graph(keep_outputs)
        loss = None
        if reason is None:
            loss = captured.run(inputs, kwargs, self.clip_norm)
        else:
            captured.graphs.skip(reason)
        if loss is None:
            captured.graphs.tell()
        else:
            self._new_window()
        return loss

    def _why_no_graph(self, keep_outputs: bool) -> str | None:
        device = next((each for each in self._replicas.devices if each.type != GRAPH_DEVICE), None)
        collects = self.accumulate > 1 or self._keeps_accumulating or self._cycle.window.calls
        reasons = {
            f"there are no CUDA graphs on {device}": device is not None,
            "the optimizer's state is in shards": self.shard_optimizer and len(self._replicas.devices) > 1,
            "several processes agree on each update": self._together is not None,
            "ranks meet in synchronised layers": self._passes.joint,
            "gradients are accumulated over several calls": collects,
            "error_if_nonfinite=True waits for the gradients": self.error_if_nonfinite,
            'shares="auto" takes the time of each rank': self.shares == "auto",
            "its outputs are returned": keep_outputs,
            "the optimizer is not fused": self._updates.memory is None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _enter(self) -> None:
        """Before a call: the first of a window takes the settings, and the loss scale, as they are now."""
        if self._cycle.window.calls == 0:
            self._new_window()
        self._cycle.enter()

    def _update(self, standing: Standing = Standing.TRAINS) -> bool:
        """Says whether any process had data for an update."""
        there_was = self._cycle.update(self.clip_norm, self.error_if_nonfinite, standing) is not None
        self._new_window()
        return there_was

    def _bring_up_to_date(self) -> None:
        """Before a forward: all that ranks have of the user's."""
        self._refresh()
        self._replicas.mirror_buffers()
        self._losses.follow()

    def _refresh(self) -> None:
        """Brings the ranks up to what the user has done to the module since the last call."""
        if self._replicas.follow():
            self._sync.watch_parameters()
            self._passes.look_for_draws()
        if self._updates.values_changed():
            self._replicas.send_values()
            self._updates.remember_values()

    def plan(self) -> list[RankPlan]:
        """What each rank does: its device, its share of the rows, and how many it had in the last call."""
        return self._split_plan.table()

    def _give_up(self, error: BaseException) -> None:
        """Waits for ranks that are still at work, and drops what the calls since the last update have left."""
        self._sync.cancel()
        if not self._ranks_have_ended():
            return
        broken = None
        if self._together is not None:
            self._broken = "the other processes may not know that a step was given up"
            broken = self._together.give_up(self._sync, self.steps, error)
        self._cycle.restore()
        self._new_window()
        self._broken = broken or self._cycle.broken

    def _ranks_have_ended(self) -> bool:
        """After a failure: waits for those that are still at work; where one does not end, the step is broken."""
        seconds = time_limit()
        self._broken = "a rank may still be at work in a step that was given up"  # until we know: Ctrl-C may come again
        if not self._passes.stop(seconds):
            self._broken = f"a rank was still at work {seconds:g} s after its step had failed"
            return False
        return True

    def evaluate(self, *inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """The loss of a batch, without gradients and without an update; arguments and results as for a step.

        The module is used as it is: call ``net.eval()`` before.
        """
        with self._used(), span("evaluate"):
            self._bring_up_to_date()
            parts, rows = self._passes.split(inputs, kwargs, self._split_plan.shares)
            with torch.no_grad():
                try:
                    losses, outputs = self._passes.run(parts, (), backward=False, keep_outputs=return_outputs)
                except BaseException:
                    if self._ranks_have_ended():
                        self._broken = None
                    raise
                loss = Window(self.reduction, 1).add(rows, losses, self.team.devices[0])
        return (loss, outputs) if return_outputs else loss

    def flush(self) -> bool:
        """Updates by the calls since the last update, if there are any: at the end of an epoch, with ``accumulate``.

        Their gradient is divided by their own number of rows, as if so many had been planned.  Says whether there
        were any.
        """
        with self._used():
            if self._cycle.window.calls == 0:
                return False
            with span("train_step"), self._whole():
                self._conclude()
        return True

    def _conclude(self, standing: Standing = Standing.TRAINS) -> bool:
        """An update without another call."""
        self._refresh()
        self._enter()
        self._sync.begin(0, overlap=False, streams=caller_streams(self.team.devices))
        return self._update(standing)

    def join(self) -> int:
        """Follows the other processes' updates, with nothing of its own, until none of them has data left.

        Each process calls it when its data is over, before anything that all of them do together.  Calls that were
        being accumulated make an update first.  Settings of the optimizer's groups are taken from a process that still
        trains; so a scheduler of this one may be moved on by as many steps.

        Returns:
            How many updates of others it has followed.

        Raises:
            Error: a process failed, or is gone.
        """
        followed = 0
        self.flush()
        if self._together is None:
            return followed
        with self._used(), span("train_step"):
            while True:
                before = self.steps
                with self._whole():
                    if not self._conclude(Standing.JOINED):
                        return followed
                followed += self.steps - before  # an overflow of the loss scale is no update

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Around an update or a call on the way to it: all of it happens, or nothing, in all processes."""
        try:
            if self._together is not None:
                self._together.open(self._sync)
            yield
        except BaseException as error:
            self._give_up(error)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, calls add their gradients up; the first call after it that may, updates by all of them."""
        before, self._keeps_accumulating = self._keeps_accumulating, True
        try:
            yield
        finally:
            self._keeps_accumulating = before

    def register_comm_hook(self, hook: CommHook | None) -> None:
        """Lets ``hook(bucket)`` sum each bucket over the devices instead of the all-reduce; ``None`` takes it away.

        It is called with a :class:`GradientBucket` as soon as the bucket is ready, in the thread of a rank, while
        others are in their backward; between the graphs of a captured step in the caller's thread, where Ctrl-C waits
        until it has returned.  It leaves the same bits on all devices.  A team on one device sends nothing, and does
        not call it.

        Raises:
            RuntimeError: gradients are being accumulated.
        """
        if self._cycle.window.calls:
            raise RuntimeError("a communication hook changes between updates, not between calls that accumulate")
        self._comm_hook = self._sync.between.hook = hook

    def sync_parameters(self) -> None:
        """Gives all devices the values of ``net``: after writes through ``.data``, which torch does not count.

        With a ``process_group`` all processes call it, and get the parameters and buffers of process 0.
        """
        with self._used():
            if self._together is not None:
                self._together.take_values()
            self._replicas.send_values()
            self._updates.remember_values()

    def check_replicas(self) -> None:
        """Compares the parameters of all ranks bit by bit; waits for the devices.

        Values that were changed in place since the last step are sent to all devices first, as a step does.  With a
        ``process_group`` all processes call it, and are compared as well.

        Raises:
            Error: names the parameter and the rank, or the process, that differs.
        """
        with self._used():
            self._refresh()
            found = first_difference(self._replicas)
            among_processes = None if self._together is None else self._together.first_difference()
        advice = "step.sync_parameters() makes them equal"
        if found is not None:
            name, rank = found
            raise Error(
                f"parameter {name} of rank {rank} on {self.team.devices[rank]} differs from {self.team.devices[0]}'s: "
                f"{advice}; something wrote to one device alone"
            )
        if among_processes is not None:
            name, process = among_processes
            raise Error(
                f"parameter {name} of process {process} differs from process 0's: {advice}; something wrote to one "
                "process alone"
            )

    def state_dict(self) -> dict[str, Any]:
        """Module, optimizer and random numbers, as compact copies; loads into a step of another number of ranks."""
        with self._used():
            counts: dict[str, Any] = {"steps": self.steps, "loss_scale": self.loss_scale.state_dict()}
            counts["shares"] = self._split_plan.measured()
            return state_of(self.module, self.optimizer) | counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts a state back that :meth:`state_dict` made; calls that were being accumulated are dropped.

        With a ``process_group`` all processes load it.

        Raises:
            ValueError: a state that does not fit, before anything is changed; other processes loaded another one.
        """
        with self._used():
            self._load(state)
            self._cycle.steps = int(state["steps"])
            self.loss_scale.load_state_dict(state["loss_scale"])
            self._split_plan.resume(state["shares"])
            self._sync.abandon()
            self._new_window()
            if self._together is not None:
                self._broken = "the processes have loaded other states"
                self._together.start(self._facts(self.steps))
                self._broken = None

    def _load(self, state: Any) -> None:
        try:
            load_state(state, self.module, self.optimizer)
        except BaseException as error:
            if self._together is not None:
                self._together.check_all_well(error)
            raise
        if self._together is not None:
            self._together.check_all_well(None)

    def rebuild(self) -> None:
        """Makes the replicas anew from ``net`` as it is: after its parameters, modules or attributes were changed."""
        with self._holder.held():
            self._refuse_closed()
            self._leave()
            check_place(self.module, self.team)
            check_optimizer(self.optimizer, dict(self.module.named_parameters()))
            self._build(self.steps)

    def close(self) -> None:
        """Gives ``net`` and the optimizer memory of their own again, and ends the threads; the step is over."""
        with self._holder.held():
            if not self._closed:
                self._closed = True
                self._leave()
                self.team.close()

    def _leave(self) -> None:
        self._finalizer()
        if self._captured is not None:
            self._captured.graphs.clear()
        self._sync.abandon()
        self._updates.close()
        self._replicas.release()

    @contextmanager
    def _used(self) -> Iterator[None]:
        with self._holder.held():
            self._refuse_closed()
            if self._processes is not None and self._processes.lost is not None:
                raise Error(self._processes.lost)
            if self._broken is not None:
                raise Error(f"{self._broken}: call step.rebuild(), or make a new one")
            yield

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this step was closed")

    def __getstate__(self) -> Any:
        raise TypeError(
            "a TrainStep has threads and devices of its own, which cannot be copied or saved: save step.state_dict(), "
            "or make a new step of a copy of the module"
        )


def _take_hooks_away(*handles: dict[Any, Any]) -> None:
    for each in handles:
        for handle in each.values():
            handle.remove()
        each.clear()
