"""Forward, loss and backward of all ranks, from a batch to losses and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from mgpu_core.device.clock import RankClock
from mgpu_core.device.random import current_stream
from mgpu_core.device.streams import caller_streams, on
from mgpu_core.nested import flatten
from mgpu_core.nothing import NOTHING
from mgpu_core.parallel.apply import run_ranks, shares_generator
from mgpu_core.parallel.gather import gather
from mgpu_core.parallel.scatter import scatter_objects
from mgpu_core.record import span
from mgpu_core.train.loss import RankLoss, rank_loss
from mgpu_core.train.rank_modules import RankModules
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.rollback import Gate

__all__ = ["ForwardBackward", "RankPart", "seed"]

LossFn = Callable[..., Any]
_Call = Callable[[], Any]


@dataclass(slots=True)
class RankPart:
    """The inputs of one rank, and the factor of its loss before backward."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...]  # empty where the module returns the loss
    seed: float = 1.0


def seed(parts: Sequence[RankPart], seeds: Sequence[float]) -> None:
    """Tell each part what its loss is multiplied by before backward."""
    for part, each in zip(parts, seeds, strict=True):
        part.seed = each


class ForwardBackward:
    """The calls of one step.

    Args:
        replicas: the ranks' parameters.
        net: their modules.
        loss: their loss functions: modules with tensors, or one function for all; ``None``: the module returns it.
        reduction: what a loss function returns.
        amp_dtype: what autocast computes in; ``None``: the caller's own setting.
        rng: as in :func:`mgpu_core.parallel_apply`.
        workers: ``threads`` or ``caller``, as in :func:`mgpu_core.parallel_apply`.
        dim: the dimension of the rows.
    """

    def __init__(
        self,
        replicas: Replicas,
        net: RankModules,
        loss: RankModules | LossFn | None,
        reduction: str,
        amp_dtype: torch.dtype | None,
        rng: str,
        workers: str,
        dim: int,
    ) -> None:
        self._replicas, self._team, self._net, self._reduction = replicas, replicas.team, net, reduction
        self._loss: Any = loss
        self._amp_dtype, self._rng, self.workers, self._dim = amp_dtype, rng, workers, dim
        self._count = len(replicas.team)
        self._gate: Gate | None = None  # of the call that runs, if its ranks have one
        self._shares_generator = shares_generator(replicas.team)
        self._is_on_cpu = all(device.type == "cpu" for device in replicas.devices)

    def split(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], shares: Sequence[float] | None
    ) -> tuple[list[RankPart], list[int]]:
        """Return what each rank works on, and its rows."""
        if self._loss is None:
            objects: dict[str, Any] = {"inputs": inputs, "kwargs": kwargs}
        elif inputs:
            objects = {"inputs": inputs[:-1], "kwargs": kwargs, "target": inputs[-1]}
        else:
            raise TypeError("a step needs a target as its last positional argument: loss_fn(output, target)")
        cut, rows = scatter_objects(objects, self._team, self._dim, shares=shares)
        return [RankPart(tuple(args), names, tuple(target)) for args, names, *target in cut], rows

    def run(
        self, parts: Sequence[RankPart | None], clocks: Sequence[RankClock], *, backward: bool, keep_outputs: bool
    ) -> tuple[list[RankLoss], Any]:
        """Run forward and loss of each part, and backward.

        Args:
            parts: one per rank; ``None``: that rank rests, and has no loss.
            clocks: per rank of the team what takes its time; empty: none is taken.
            backward: whether there is one.
            keep_outputs: whether outputs are returned.

        Returns:
            Each rank's loss, detached; the outputs of all ranks, joined on the first device and detached, or ``None``.

        Raises:
            Exception: the first failing rank's, as :func:`mgpu_core.parallel_apply` words it.
            RuntimeError: no loss depends on a parameter that requires grad; the forward writes parameters that several
                ranks share.
        """
        count = len(parts)
        team = self._team if count == self._count else self._team.first(count)
        modules, loss_fns = self._net.of_ranks(count), self._loss_functions(count)
        joint = backward and count > 1 and self._is_joint(parts)
        workers = "threads" if self._net.tree.ranks_meet else self.workers
        work = partial(self._work, backward=backward and not joint, keep_outputs=keep_outputs)
        calls: list[_Call | None] = [
            None if part is None else partial(work, modules[rank], loss_fns[rank], rank, part)
            for rank, part in enumerate(parts)
        ]
        self._gate = None
        if clocks or not self._is_on_cpu or (count > 1 and workers == "threads"):
            calls = self._attended(calls, clocks)
        if count == 1:  # failures are the module's own
            results = [call() for call in calls if call is not None]
        else:
            versions = self._replicas.versions
            draws = self._shares_generator and self._draws()
            results = run_ranks(team, calls, draws=draws, workers=workers)
            self._replicas.check_unwritten(versions)
            self._net.let_go(modules)
        found = [result for result in results if result is not None]
        losses = [loss for loss, _ in found]
        if joint:
            with span("backward"):
                _differentiate(losses, [part.seed for part in parts if part is not None])
        if backward and losses:
            _check_losses(losses)
        outputs = gather([each for _, each in found], team.devices[0], self._dim) if keep_outputs else None
        return losses, outputs

    def stop(self, seconds: float) -> bool:
        """Let no rank begin any more; return whether all have ended in that time."""
        return self._gate is None or self._gate.shut(seconds)

    def _attended(self, calls: Sequence[_Call | None], clocks: Sequence[RankClock]) -> list[_Call | None]:
        """Return the calls as each rank's worker runs them: on its device and stream, and timed if there are clocks."""
        gate, devices = Gate(), self._team.devices
        self._gate = gate
        streams = caller_streams(devices)

        def attended(rank: int, call: _Call) -> Any:
            with gate, on(devices[rank], streams[rank]), clocked(clocks[rank]) if clocks else NOTHING:
                return call()

        return [None if call is None else partial(attended, rank, call) for rank, call in enumerate(calls)]

    def _loss_functions(self, count: int) -> Sequence[LossFn | None]:
        return self._loss.of_ranks(count) if isinstance(self._loss, RankModules) else [self._loss] * count

    def _draws(self) -> bool:
        return self._rng == "per_rank" or current_stream() is not None or self._net.tree.draws_random_numbers()

    def _is_joint(self, parts: Sequence[RankPart | None]) -> bool:
        """Return whether one backward is made for all ranks, after all forwards.

        Some nodes belong to several ranks where these met in a synchronised layer, where inputs have a graph already,
        and inside ``parametrize.cached()``.  From the caller's thread one backward drives all accelerators at once.
        """
        if self._net.tree.ranks_meet or parametrize._cache_enabled > 0:
            return True
        if self.workers == "caller" and not self._is_on_cpu:
            return True
        return any_has_graph(parts)

    def _work(
        self,
        module: Module,
        loss_fn: LossFn | None,
        rank: int,
        part: RankPart,
        *,
        backward: bool,
        keep_outputs: bool,
    ) -> tuple[RankLoss, Any]:
        """Run one rank, in its worker or in the caller's thread; return its loss, and its outputs if they are kept."""
        device = self._team.devices[rank]
        with NOTHING if self._amp_dtype is None else torch.autocast(device.type, dtype=self._amp_dtype):
            with span("forward", rank, device):
                output = module(*part.inputs, **part.kwargs)
            if loss_fn is None:
                loss = rank_loss(output, self._reduction)
            else:
                with span("loss", rank, device):
                    loss = rank_loss(loss_fn(output, *part.target), self._reduction)
        if backward:
            with span("backward", rank, device):
                _differentiate([loss], [part.seed])
        return loss, _detached(output) if keep_outputs else None


def _check_losses(losses: Sequence[RankLoss]) -> None:
    for loss in losses:
        if not loss.is_constant:
            return
    raise RuntimeError("the loss does not depend on any parameter that requires grad: there is nothing to train")


@contextmanager
def clocked(clock: RankClock) -> Iterator[None]:
    """Time the work of a rank."""
    clock.start()
    yield
    clock.stop()


_run_backward = torch.autograd.Variable._execution_engine.run_backward  # what torch.autograd.backward ends in


def _differentiate(losses: Sequence[RankLoss], seeds: Sequence[float]) -> None:
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
            grads += (torch.full_like(value, seed),)
    if values:
        with _without_autocast() if torch._C._is_any_autocast_enabled() else NOTHING:
            if values[0].is_cpu:
                # It runs in this thread.  torch.autograd.backward would make twenty calls more before it does the same.
                _run_backward(
                    tuple(values), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            else:
                torch.autograd.backward(values, grads)
    for loss in losses:
        loss.value = loss.value.detach()


def _without_autocast() -> AbstractContextManager[object]:
    found = torch.accelerator.current_accelerator()
    stack = ExitStack()
    for kind in {"cpu", "cpu" if found is None else found.type}:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def any_has_graph(parts: Sequence[RankPart | None]) -> bool:
    """Return whether an input of some rank belongs to a graph."""
    for part in parts:
        if part is None:
            continue
        leaves: Sequence[Any] = part.inputs
        for each in leaves:
            if type(each) is not torch.Tensor:
                leaves = _leaves_of([part.inputs, part.kwargs])
                break
        if part.kwargs and leaves is part.inputs:
            leaves = _leaves_of([part.inputs, part.kwargs])
        for each in leaves:
            if isinstance(each, torch.Tensor) and each.requires_grad:
                return True
    return False


def _leaves_of(nest: Any) -> list[Any]:
    leaves: list[Any] = []
    flatten(nest, leaves, "inputs", whole=True)
    return leaves


def _detached(output: Any) -> Any:
    leaves: list[Any] = []
    tree = flatten(output, leaves, "outputs", whole=True)
    return tree.unflatten(iter([each.detach() if isinstance(each, torch.Tensor) else each for each in leaves]))
