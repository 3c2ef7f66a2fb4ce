"""Forward, loss and backward of all ranks, from a batch to losses and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from mgpu_core.parallel.first_calls import Call, FirstCalls
from mgpu_core.parallel.first_calls.lost import LostAttributes, text_of_lost
from mgpu_core.parallel.first_calls.originals import Originals
from mgpu_core.parallel.first_calls.rows import RowsElsewhere
from mgpu_core.parallel.first_calls.shared import SharedObjects
from mgpu_core.parallel.scatter_inputs import scatter_objects
from mgpu_core.ranks.draws import Draws
from mgpu_core.ranks.rank_clock import RankClock
from mgpu_core.ranks.run import Run, shares_generator
from mgpu_core.ranks.worker_choice import IN_TURNS, MEETING, Workers, workers_for
from mgpu_core.step.joined_outputs import gathered
from mgpu_core.step.loss import RankLoss, Window, output_loss, rank_loss
from mgpu_core.step.loss_check import LossState
from mgpu_core.step.loss_weights import LossWeights, weight_of
from mgpu_core.step.options import Options
from mgpu_core.step.rank_modules import RankModules
from mgpu_core.step.replicas import Replicas
from mgpu_core.step.split_plan import SplitPlan
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.support.warnings import warn_user
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span
from mgpu_core.trees.nested import map_leaves, moved, tensors_in

__all__ = [
    "ForwardBackward",
    "RankPart",
    "any_has_graph",
    "check_losses",
    "detached",
    "differentiate",
    "seed",
    "way_to_pass",
]

_WATCHED = 2  # first calls
LossFn = Callable[..., Any]
_Call = Callable[[], Any]


@dataclass(slots=True)
class RankPart:
    """The inputs of one rank, and the factor of its loss before backward."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...]  # empty where the module returns the loss
    seed: float | torch.Tensor = 1.0
    state: LossState | None = None  # of the loss function, if this part's loss is watched
    unit: float = 0.0  # the factor of a mean over labels, besides their weight; 0: weights are not counted


def way_to_pass(inputs: tuple[Any, ...]) -> str:
    """Return a hint for a batch that came as one argument; empty for other calls."""
    if len(inputs) != 1 or not isinstance(inputs[0], Mapping | tuple | list):
        return ""
    stars = "**" if isinstance(inputs[0], Mapping) else "*"
    return f"the whole batch came as one {type(inputs[0]).__name__}: step({stars}batch) passes its entries"


def seed(parts: Sequence[RankPart], window: Window, rows: Sequence[int]) -> None:
    """Set the factors of each part's loss before backward."""
    for part, factor in zip(parts, window.seeds(rows), strict=True):
        part.seed = factor
    if window.is_whole and len(parts) == 1:
        return
    elements = 0
    for part in parts:
        if part.target and type(part.target[0]) is torch.Tensor and part.target[0].ndim > 1:
            elements += part.target[0].numel()
    unit = window.unit(elements)
    for part in parts:
        part.unit = unit


class ForwardBackward:
    """The calls of one step.

    Args:
        options: of the step.
        replicas: the ranks' parameters.
        net: their modules.
        loss: their loss functions: modules with tensors, or one function for all; ``None``: the module returns it.
        rng: as in :func:`mgpu_core.parallel_apply`.
        split_plan: which rank gets which rows.

    Attributes:
        split_plan: the same.
        gathers: the loss is computed once, on the outputs of all ranks.
        weights: counts the divisors of torch's losses.
    """

    def __init__(
        self, options: Options, replicas: Replicas, net: RankModules, loss: Any, rng: str,
        split_plan: SplitPlan,
    ) -> None:  # fmt: skip
        self._replicas, self._team, self._net, self._loss = replicas, replicas.team, net, loss
        self._cut_devices: Sequence[torch.device] = replicas.team.devices
        self._alone = loss.module if isinstance(loss, RankModules) else loss  # the loss function of one rank
        self._reduction, self._amp_dtype, self._dim = options.reduction, options.amp_dtype, options.dim
        self.gathers = options.loss_on == "gathered"
        self.weights = LossWeights(self._alone)
        self._counts_weights = options.reduction == "mean" and self._alone is not None
        self._may_be_empty = options.has_processes  # others may have rows
        self.split_plan = split_plan
        self._usual_workers = workers_for(options.workers, replicas.team.devices)
        self._draws = Draws(rng, type(net.module).__name__)
        self._ranks = len(replicas.team)
        self._first_calls = FirstCalls()
        if not net.is_static:
            observers = LostAttributes(rank=1, rank_0_keeps=True), SharedObjects(used_by=self._alone), Originals()
            self._first_calls = FirstCalls(*((each, _WATCHED) for each in observers))
        self._first_outputs = FirstCalls((RowsElsewhere(options.dim), _WATCHED))
        self._gathered_reads = LossState(self._alone)
        self._first_losses = FirstCalls((self._gathered_reads, _WATCHED))
        self._run: Run | None = None  # the call that runs
        self._shares_generator = shares_generator(replicas.team)
        self._is_on_cpu = all(device.type == "cpu" for device in replicas.devices)
        self._is_bare = self._is_on_cpu and self._ranks == 1  # nothing is to be set up for a rank

    @property
    def ranks_meet(self) -> bool:
        """True if ranks wait for each other in the forward."""
        tree = self._net.tree
        return tree.ranks_meet

    @property
    def workers(self) -> Workers:
        """How the ranks of the next call run."""
        tree = self._net.tree
        turns = tree.takes_turns and self._shares_generator
        return MEETING if tree.ranks_meet else IN_TURNS if turns else self._usual_workers

    def split(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[RankPart], list[int]]:
        """Return the inputs of each rank, and their rows."""
        objects: dict[str, Any] = {"inputs": inputs}
        if kwargs:
            objects["kwargs"] = kwargs
        if self._loss is not None:
            if not inputs or not (kwargs or inputs[1:]):
                hint = way_to_pass(inputs)
                raise TypeError(
                    "a step needs a target as its last positional argument, after the inputs: step(x, target) calls "
                    f"loss_fn(net(x), target){f'; {hint}' if hint else ''}"
                )
            objects["inputs"] = inputs[:-1]
            if not self.gathers:
                objects["target"] = inputs[-1]
        cut, rows = scatter_objects(objects, self._cut_devices, self._dim, shares=self.split_plan.shares)
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
    ) -> tuple[list[RankLoss], list[int], Any]:  # fmt: skip
        """Do as :meth:`run_apart`, and join the outputs; ``None`` unless they are kept."""
        losses, weighed, outputs = self.run_apart(window, parts, rows, inputs, keep_outputs)
        return losses, weighed, self.joined(outputs, rows) if keep_outputs else None

    def run_apart(
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
            Exception: the first failing rank's, as :func:`mgpu_core.parallel_apply` words it.
            RuntimeError: no loss depends on a parameter that requires grad; the forward writes parameters that several
                ranks share.
        """
        if window is not None and not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.run_apart(window, parts, rows, inputs, keep_outputs)
        plan = self.split_plan
        clocks: Sequence[RankClock] = ()
        if window is not None:
            plan.rows = rows
            clocks = plan.clocks() if plan.is_timed else ()
        if self.gathers:
            weighed = [sum(rows)]
            whole = RankPart((), {}, (inputs[-1],))
            watched = None
            if self._first_losses.go_on:
                watched, whole.state = self._first_losses.begin(Call(self._net.module, rows=rows)), self._gathered_reads
            if window is not None:
                seed([whole], window, weighed)
            loss, output = self._run_gathered(parts, rows, clocks, whole, backward=window is not None)
            losses, outputs = [loss], [output]
            if watched is not None:
                self._first_losses.end(watched)
        else:
            weighed = rows
            if window is not None:
                seed(parts, window, rows)
            elif len(parts) > 1:
                for part in parts:
                    part.unit = 1.0
            losses, outputs = self.run_parts(parts, clocks, backward=window is not None, keep_outputs=keep_outputs)
        if clocks:
            plan.take_times(rows, clocks)
        return losses, weighed, outputs

    def run_parts(
        self, parts: Sequence[RankPart], clocks: Sequence[RankClock], *, backward: bool, keep_outputs: bool
    ) -> tuple[list[RankLoss], list[Any]]:
        """Do the same for a loss per rank."""
        if self._is_bare and not clocks:
            module, joint = self._net.module, False
            results = [self._work(module, self._alone, 0, parts[0], backward=backward, keep_outputs=keep_outputs)]
        else:
            count = len(parts)
            joint = backward and count > 1 and self._is_joint(parts)
            loss_fns = self._loss.of_ranks(count) if isinstance(self._loss, RankModules) else [self._loss] * count
            work = partial(self._work, backward=backward and not joint, keep_outputs=keep_outputs)
            results = self._over_ranks(work, parts, clocks, loss_fns)
        losses, outputs = map(list, zip(*results, strict=True)) if results else ([], [])
        if self._counts_weights and parts[0].unit:
            self.weights.settle(losses)
        if joint:
            with span("backward"):
                differentiate(losses, [part.seed for part in parts])
        if backward and losses and losses[0].is_constant:
            check_losses(losses)
        return losses, outputs if keep_outputs else []

    def _run_gathered(
        self,
        parts: Sequence[RankPart],
        rows: Sequence[int],
        clocks: Sequence[RankClock],
        whole: RankPart,
        *,
        backward: bool,
    ) -> tuple[RankLoss, Any]:
        """Run forward of each part, the loss once on the outputs of all ranks, and one backward.

        Args:
            parts: one per rank, without targets.
            rows: of each.
            clocks: one per rank; empty: no times are taken.
            whole: has the target of all rows, and the factor of the loss.
            backward: whether to make one.

        Returns:
            The loss, detached; the outputs of all ranks on the first device, detached.
        """
        rank_outputs = self._over_ranks(self._forward, parts, clocks, [None] * len(parts))
        device = self._team.devices[0]
        outputs = rank_outputs[0] if len(rank_outputs) == 1 else gathered(rank_outputs, rows, device, self._dim)
        with self.autocast(device), span("loss", 0, device):
            whole.target = (moved(whole.target[0], device),)
            loss = self.loss_of(outputs, self._alone, whole)
        if self._counts_weights and whole.unit:
            self.weights.settle([loss])
        if backward:
            with span("backward"):
                differentiate([loss], [whole.seed])
            check_losses([loss])
        return loss, detached(outputs)

    def _over_ranks(
        self,
        work: Callable[..., Any],
        parts: Sequence[RankPart],
        clocks: Sequence[RankClock],
        loss_fns: Sequence[LossFn | None],
    ) -> list[Any]:
        """Return ``work(module, loss_fn, rank, part)`` of each rank."""
        count = len(parts)
        modules, tree = self._net.of_ranks(count), self._net.tree
        workers = self.workers.way
        watched = Call(self._net.module, modules, tree, modules) if self._first_calls.go_on and count > 1 else None
        called = modules if watched is None else self._first_calls.begin(watched).called
        calls: list[_Call] = []
        for rank, part in enumerate(parts):
            calls += (partial(work, called[rank], loss_fns[rank], rank, part),)
        run = self._run = Run(self._team if count == self._ranks else self._team.first(count), clocks=clocks)
        if count == 1:  # failures are the module's own
            return [run.alone(calls[0])]
        versions = self._replicas.versions
        self._draws.ranks_meet = tree.ranks_meet
        form = tree.modes, *map(type, parts[0].inputs), *parts[0].kwargs
        try:
            with NULL_CONTEXT if tracer.sink is None else span("apply"):
                results = run.run(calls, draws=self._draws, workers=workers, form=form)
        except RuntimeError as error:
            names = [] if watched is None else self._first_calls.changed(watched)
            if "through the graph a second time" in str(error) and (names or workers == "threads"):
                raise RuntimeError(f"a loss reads a tensor of another rank's forward: {text_of_lost(names)}") from error
            raise
        self._replicas.check_unwritten(versions)
        if watched is not None:
            self._first_calls.end(watched)
        if tree.has_holders or tree.is_compiled:
            self._net.let_go(modules)
        return results

    def joined(self, outputs: list[Any], rows: Sequence[int]) -> Any:
        """Return the outputs of :meth:`run_apart` as one nest on the first device."""
        if self.gathers:
            return outputs[0]
        if self._first_outputs.go_on:
            self._first_outputs.end(self._first_outputs.begin(Call(self._net.module, rows=rows)), outputs)
        return gathered(outputs, rows, self._team.devices[0], self._dim)

    def stop(self, seconds: float) -> bool:
        """Let no rank begin any more; return whether all have ended in that time."""
        return self._run is None or self._run.stop(seconds)

    def _is_joint(self, parts: Sequence[RankPart]) -> bool:
        """Return whether one backward is made for all ranks, after all forwards.

        Some nodes belong to several ranks where these met in a synchronised layer, where inputs have a graph already,
        and inside ``parametrize.cached()``.  From the caller's thread one backward drives all accelerators at once.
        """
        if self._net.tree.ranks_meet or parametrize._cache_enabled > 0:
            return True
        if self._usual_workers.way == "caller" and not self._is_on_cpu:
            return True
        return any_has_graph(parts)

    def _work(
        self, module: Module, loss_fn: LossFn | None, rank: int, part: RankPart, *, backward: bool, keep_outputs: bool
    ) -> tuple[RankLoss, Any]:
        """Run one rank, in its worker or in the caller's thread; return its loss, and its outputs if they are kept."""
        device = self._team.devices[rank]
        model: Any = module
        if tracer.sink:
            model = partial(tracer.in_span, "forward", rank, device, module)
            loss_fn = loss_fn and partial(tracer.in_span, "loss", rank, device, loss_fn)
        with NULL_CONTEXT if self._amp_dtype is None else self.autocast(device):
            output = model(*part.inputs, **part.kwargs)
            loss = self.loss_of(output, loss_fn, part)
        if backward and tracer.sink:
            tracer.in_span("backward", rank, device, differentiate, [loss], [part.seed])
        elif backward:
            differentiate([loss], [part.seed])
        return loss, detached(output) if keep_outputs else None

    def loss_of(self, output: Any, loss_fn: LossFn | None, part: RankPart) -> RankLoss:
        """Return the loss of a rank; set the part's factor before backward, if the loss is a mean over labels."""
        if loss_fn is None:
            return rank_loss(output_loss(output), self._reduction)
        if part.state is not None:
            return self._watched_loss(part.state, output, loss_fn, part)
        if not part.unit or not self._counts_weights:
            return rank_loss(loss_fn(output, *part.target), self._reduction)
        if self.weights.keywords is None:
            result, weight = self.weights.call(loss_fn, output, *part.target)
        else:
            result = loss_fn(output, *part.target)
            weight = weight_of(output, *part.target, **self.weights.keywords, result=result)
        loss = rank_loss(result, self._reduction)
        if weight is not None:
            weight = weight.to(loss.value.dtype) if type(weight) is torch.Tensor else weight
            loss.weight, part.seed = weight, weight * part.unit
        return loss

    def _watched_loss(self, state: LossState, output: Any, loss_fn: LossFn, part: RankPart) -> RankLoss:
        part.state = None
        with state.in_loss():
            return self.loss_of(output, loss_fn, part)

    def watch_loss(self, part: RankPart) -> LossState:
        """Return the state of the loss function, which will know whether the loss of a part has changed it."""
        part.state = LossState(self._alone)
        part.state.begin()
        return part.state

    def _forward(self, module: Module, _: None, rank: int, part: RankPart) -> Any:
        device = self._team.devices[rank]
        with self.autocast(device), span("forward", rank, device):
            return module(*part.inputs, **part.kwargs)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context that forwards and losses run in."""
        return NULL_CONTEXT if self._amp_dtype is None else torch.autocast(device.type, dtype=self._amp_dtype)


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


def detached(output: Any) -> Any:
    """Return the nest with its tensors detached."""
    return map_leaves(output, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
