"""Forward, loss and backward of a step, from a batch to losses and outputs: a pass over ranks, or over a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from mgpu_core.parallel.first_calls import Call, FirstCalls
from mgpu_core.parallel.first_calls.rows import RowsElsewhere
from mgpu_core.parallel.scatter_inputs import scatter_objects
from mgpu_core.pipeline.module import Pipeline
from mgpu_core.ranks.rank_clock import RankClock
from mgpu_core.step.joined_outputs import gathered
from mgpu_core.step.loss_check import LossState
from mgpu_core.step.losses import Losses, RankLoss, RankPart
from mgpu_core.step.options import Options
from mgpu_core.step.ranks import Ranks
from mgpu_core.step.split_plan import SplitPlan
from mgpu_core.step.window import Window
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.support.warnings import warn_user
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span
from mgpu_core.trees.nested import map_leaves, moved, tensors_in

__all__ = [
    "ForwardBackward",
    "any_has_graph",
    "check_losses",
    "detached",
    "differentiate",
    "pass_over_ranks",
    "way_to_pass",
    "why_not_gathered",
]

_WATCHED = 2  # first calls


class ForwardBackward:
    """The passes of one step: over its ranks, or over the micro-batches of a pipeline.

    Args:
        options, ranks: of the step.
        split_plan: which rank gets which rows.
        pass_over: runs forward, loss and backward, as :func:`pass_over_ranks` does.

    Attributes:
        ranks, split_plan: the same.
        losses: calls the loss function.
        gathers: the loss is computed once, on the outputs of all ranks.
        run_parts: a pass: a function of the parts and clocks.
    """

    def __init__(self, options: Options, ranks: Ranks, split_plan: SplitPlan, pass_over: Callable[..., Any]) -> None:
        self.ranks, self.split_plan = ranks, split_plan
        keeps_casts = options.shard != "parameters"
        self.losses = Losses(ranks.loss_fn, options.reduction, options.amp_dtype, caches_casts=keeps_casts)
        self.gathers = options.loss_on == "gathered"
        self._has_loss, self._dim = options.loss_fn is not None, options.dim
        self._may_be_empty = options.has_processes  # others may have rows
        self.run_parts = partial(pass_over, ranks, self.losses)
        self._first_outputs = FirstCalls((RowsElsewhere(options.dim), _WATCHED))
        self._gathered_reads = LossState(ranks.loss_fn)
        self._first_losses = FirstCalls((self._gathered_reads, _WATCHED))

    def split(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, stays: bool = False
    ) -> tuple[list[RankPart], list[int]]:
        """Return the part of each rank or micro-batch, on its device, and its rows.

        Args:
            inputs, kwargs: of the call.
            stays: the parts are views, and stay where the batch is.
        """
        objects: dict[str, Any] = {"inputs": inputs}
        if kwargs:
            objects["kwargs"] = kwargs
        if self._has_loss:
            if not inputs or not (kwargs or inputs[1:]):
                hint = way_to_pass(inputs)
                raise TypeError(
                    "a step needs a target as its last positional argument, after the inputs: step(x, target) calls "
                    f"loss_fn(net(x), target){f'; {hint}' if hint else ''}"
                )
            objects["inputs"] = inputs[:-1]
            if not self.gathers:
                objects["target"] = inputs[-1]
        module = self.ranks.net.module
        devices: Sequence[torch.device] = self.ranks.team.devices
        if isinstance(module, Pipeline):
            devices = [module.device_ids[0]] * module.chunks
        how: Literal["keep", "view"] = "keep" if stays else "view"
        cut, rows = scatter_objects(objects, devices, self._dim, shares=self.split_plan.shares, how=how)
        if not rows[0] and not any(rows) and not self._may_be_empty:
            warn_user("the batch has no rows: the mean of their losses is NaN, as on one device, and nothing is learnt")
        parts: list[RankPart] = []
        for args, *others in cut:
            named = others.pop(0) if kwargs else {}
            parts += (RankPart(tuple(args), named, tuple(others)),)
        return parts, rows

    def run(
        self, window: Window | None, parts: Sequence[RankPart], rows: list[int], inputs: tuple[Any, ...],
        keep_outputs: bool,
    ) -> tuple[list[RankLoss], list[int], list[Any]]:  # fmt: skip
        """Run forward, loss and backward of all ranks.

        Args:
            window: gives the factor of losses before backward; ``None``: no backward.
            parts, rows: one per rank, of :meth:`split`.
            inputs: of all rows; the last is the target, for a loss on the gathered outputs.
            keep_outputs: whether outputs are returned.

        Returns:
            The losses, and the rows of each: one per rank, or one for all.  The outputs that belong to them, detached;
            of losses per rank only if they are kept, otherwise empty.

        Raises:
            Exception: as :func:`pass_over_ranks`.
        """
        if window is not None and not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.run(window, parts, rows, inputs, keep_outputs)
        plan = self.split_plan
        clocks: Sequence[RankClock] = ()
        if window is not None:
            plan.rows = rows
            clocks = plan.clocks() if plan.is_timed else ()
        if self.gathers:
            weighed = [sum(rows)]
            loss, output = self._run_gathered(window, parts, rows, clocks, inputs[-1])
            losses, outputs = [loss], [output]
        else:
            weighed = rows
            if window is not None:
                window.seed(parts, rows)
            elif len(parts) > 1:
                for part in parts:
                    part.unit = 1.0
            losses, outputs = self.run_parts(parts, clocks, backward=window is not None, keep_outputs=keep_outputs)
        if clocks:
            plan.take_times(rows, clocks)
        if self.ranks.shards is not None:
            self.ranks.shards.check_unwritten()
            self.ranks.end_blocks()
        return losses, weighed, outputs

    def _run_gathered(
        self,
        window: Window | None,
        parts: Sequence[RankPart],
        rows: list[int],
        clocks: Sequence[RankClock],
        target: Any,
    ) -> tuple[RankLoss, Any]:
        """Run forward of each part, the loss once on the outputs of all ranks, and one backward.

        Args:
            window, rows: as for :meth:`run`.
            parts: one per rank, without targets.
            clocks: one per rank; empty: no times are taken.
            target: of all rows.

        Returns:
            The loss, detached; the outputs of all ranks on the first device, detached.
        """
        ranks, losses, device, watched = self.ranks, self.losses, self.ranks.team.devices[0], None
        whole = RankPart((), {}, (target,))
        if self._first_losses.go_on:
            watched = self._first_losses.begin(Call(ranks.net.module, rows=rows))
            whole.watch = self._gathered_reads.in_loss()
        if window is not None:
            window.seed([whole], [sum(rows)])
        forward = partial(_forward_of_rank, losses, ranks.team.devices)
        rank_outputs = ranks.run(forward, parts, clocks, with_loss=False)
        outputs = rank_outputs[0] if len(rank_outputs) == 1 else gathered(rank_outputs, rows, device, self._dim)
        with losses.autocast(device), span("loss", 0, device):
            whole.target = (moved(target, device),)
            loss = losses.of(outputs, ranks.loss_fn, whole)
        if losses.counts and whole.unit:
            losses.settle([loss])
        if window is not None:
            with span("backward"):
                differentiate([loss], [whole.seed])
            check_losses([loss])
        if watched is not None:
            self._first_losses.end(watched)
        return loss, detached(outputs)

    def joined(self, outputs: list[Any], rows: Sequence[int]) -> Any:
        """Return the outputs of :meth:`run` as one nest on the first device."""
        if self.gathers:
            return outputs[0]
        if self._first_outputs.go_on:
            self._first_outputs.end(self._first_outputs.begin(Call(self.ranks.net.module, rows=rows)), outputs)
        return gathered(outputs, rows, self.ranks.team.devices[0], self._dim)


def pass_over_ranks(
    ranks: Ranks,
    losses: Losses,
    parts: Sequence[RankPart | None],
    clocks: Sequence[RankClock],
    *,
    backward: bool,
    keep_outputs: bool,
) -> tuple[list[RankLoss], list[Any]]:
    """Run forward and loss of each part, and backward.

    Args:
        ranks, losses: of the step.
        parts: one per rank; ``None``: it does nothing.
        clocks: one per rank; empty: no times are taken.
        backward: whether to make one.
        keep_outputs: whether outputs are returned.

    Returns:
        The loss of each rank that has a part, and its output, detached, if it is kept; otherwise no outputs.

    Raises:
        Exception: the first failing rank's, as :func:`mgpu_core.parallel_apply` words it.
        RuntimeError: no loss depends on a parameter that requires grad; the forward writes parameters that several
            ranks share.
    """
    devices, module, joint = ranks.team.devices, ranks.net.module, False
    present = list(filter(None, parts))
    if ranks.is_bare and not clocks:
        results = [_pass_of_rank(losses, devices, backward, keep_outputs, module, ranks.loss_fn, 0, present[0])]
    else:
        joint = backward and present[1:] != [] and _is_joint(ranks, present)
        work = partial(_pass_of_rank, losses, devices, backward and not joint, keep_outputs)
        results = ranks.run(work, parts, clocks, with_loss=True)
    rank_losses, outputs = map(list, zip(*results, strict=True)) if results else ([], [])
    if losses.counts and present[0].unit:
        losses.settle(rank_losses)
    if joint:
        with span("backward"):
            differentiate(rank_losses, [part.seed for part in present])
    if backward and rank_losses and rank_losses[0].is_constant and present == [*parts]:  # others may learn
        check_losses(rank_losses)
    return rank_losses, outputs if keep_outputs else []


def _pass_of_rank(
    losses: Losses,
    devices: Sequence[torch.device],
    backward: bool,
    keep_outputs: bool,
    module: Module,
    loss_fn: Callable[..., Any] | None,
    rank: int,
    part: RankPart,
) -> tuple[RankLoss, Any]:
    """Run one rank, in its worker or in the caller's thread; return its loss, and its outputs if they are kept."""
    device = devices[rank]
    model: Any = module
    if tracer.sink:
        model = partial(tracer.in_span, "forward", rank, device, module)
        loss_fn = loss_fn and partial(tracer.in_span, "loss", rank, device, loss_fn)
    with NULL_CONTEXT if losses.amp_dtype is None else losses.autocast(device):
        output = model(*part.inputs, **part.kwargs)
        loss = losses.of(output, loss_fn, part)
    if backward and tracer.sink:
        tracer.in_span("backward", rank, device, differentiate, [loss], [part.seed])
    elif backward:
        differentiate([loss], [part.seed])
    return loss, detached(output) if keep_outputs else None


def _is_joint(ranks: Ranks, parts: Sequence[RankPart]) -> bool:
    """Return whether one backward is made for all ranks, after all forwards.

    Some nodes belong to several ranks where these met in a synchronised layer, where inputs have a graph already,
    and inside ``parametrize.cached()``.  From the caller's thread one backward drives all accelerators at once.
    """
    if ranks.net.tree.ranks_meet or parametrize._cache_enabled > 0:
        return True
    if ranks.usual_workers.way == "caller" and not ranks.team.on_host:
        return True
    return any_has_graph(parts)


def _forward_of_rank(
    losses: Losses, devices: Sequence[torch.device], module: Module, _: None, rank: int, part: RankPart
) -> Any:
    device = devices[rank]
    with losses.autocast(device), span("forward", rank, device):
        return module(*part.inputs, **part.kwargs)


def check_losses(losses: Sequence[RankLoss]) -> None:
    """Raise RuntimeError if no loss depends on anything that requires grad."""
    for loss in losses:
        if not loss.is_constant:
            return
    raise RuntimeError("the loss does not depend on any parameter that requires grad: there is nothing to train")


_run_backward = torch.autograd.Variable._execution_engine.run_backward  # what torch.autograd.backward ends in


def differentiate(losses: Sequence[RankLoss], seeds: Sequence[Any]) -> None:
    """Make one backward from all losses, and detach them.

    It runs in the dtypes of its forward: autocast, which would choose a second time, is off.
    """
    values: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for loss, seed in zip(losses, seeds, strict=True):
        value = loss.value
        loss.is_constant = not value.requires_grad
        if value.requires_grad:
            values += (value,)
            grads += (seed.to(value) if type(seed) is torch.Tensor else torch.full_like(value, seed),)
    if values:
        if torch._C._is_any_autocast_enabled():
            with _without_autocast():
                torch.autograd.backward(values, grads)
        elif values[0].is_cpu:
            # It runs in this thread.  torch.autograd.backward would make twenty calls more before it does the same.
            _run_backward(tuple(values), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)
        else:
            torch.autograd.backward(values, grads)
    for loss in losses:
        loss.value = loss.value.detach()


def _without_autocast() -> AbstractContextManager[object]:
    accelerator = torch.accelerator.current_accelerator()
    stack = ExitStack()
    for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def detached(output: Any) -> Any:
    """Return the nest with its tensors detached."""
    return map_leaves(output, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)


def any_has_graph(parts: Sequence[RankPart]) -> bool:
    """Return whether an input of some rank belongs to a graph."""
    for part in parts:
        leaves: Sequence[Any] = part.inputs
        if part.kwargs or not set(map(type, leaves)) <= {torch.Tensor}:
            leaves = tensors_in([part.inputs, part.kwargs])
        for tensor in leaves:
            if tensor.requires_grad:
                return True
    return False


def way_to_pass(inputs: tuple[Any, ...]) -> str:
    """Return a hint for a batch that came as one argument; empty for other calls."""
    if len(inputs) != 1 or not isinstance(inputs[0], Mapping | tuple | list):
        return ""
    stars = "**" if isinstance(inputs[0], Mapping) else "*"
    return f"the whole batch came as one {type(inputs[0]).__name__}: step({stars}batch) passes its entries"


def why_not_gathered(options: Options) -> str | None:
    """Return why a loss on gathered outputs does not go with the other arguments of a step; ``None``: it does."""
    reasons = (
        (options.loss_fn is None, "loss_fn=None: each rank's module returns its loss"),
        (options.has_processes, "process_group: outputs of other processes are not gathered"),
        (options.capture, "capture=True: a graph holds the work of one device"),
    )
    reason = next((reason for holds, reason in reasons if holds), None)
    return f'loss_on="gathered" does not go with {reason}' if options.loss_on == "gathered" and reason else None
