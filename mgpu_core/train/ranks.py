"""Forward, loss and backward of each rank, in its worker: what every rank does at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.device.clock import RankClock
from mgpu_core.device.streams import caller_streams, on
from mgpu_core.device.team import Team
from mgpu_core.nested import flatten
from mgpu_core.nothing import NOTHING
from mgpu_core.parallel.apply import apply_some
from mgpu_core.record import span
from mgpu_core.train.loss import RankLoss, rank_loss

__all__ = ["Pass", "RankPart", "has_graph", "run_pass", "seed"]

LossFn = Callable[..., Any]


@dataclass(slots=True)
class RankPart:
    """What one rank works on, and what its loss is multiplied by before backward."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...]  # none, where the module returns the loss
    seed: float


def seed(parts: Sequence[RankPart], seeds: Sequence[float]) -> None:
    """Tells each part what its loss is multiplied by before backward."""
    for part, each in zip(parts, seeds, strict=True):
        part.seed = each


@dataclass(slots=True)
class Pass:
    """One call over the ranks.

    Attributes:
        modules: per rank its module.
        loss_fns: per rank its loss function; ``None``: the module returns the loss.
        reduction: what the loss function returns.
        backward: whether there is one.
        joint: one backward for all ranks, after all forwards: nodes of theirs belong to several ranks.
        keep_outputs: whether outputs are returned.
        rng: as in :func:`mgpu_core.parallel_apply`.
        amp_dtype: what autocast computes in; ``None``: the caller's own setting.
        gate: that the ranks pass.
        clocks: per rank what its time is taken by; none: it is not.
    """

    modules: Sequence[Module]
    loss_fns: Sequence[LossFn | None]
    reduction: str
    backward: bool
    joint: bool
    keep_outputs: bool
    rng: str
    amp_dtype: torch.dtype | None
    gate: AbstractContextManager[None]
    clocks: Sequence[RankClock] = ()


def run_pass(job: Pass, team: Team, parts: Sequence[RankPart | None]) -> list[tuple[RankLoss, Any]]:
    """Runs all ranks at once; returns per rank its loss and, if they are kept, its outputs, detached.

    Ranks whose part is ``None`` rest, and are not among the results.

    Raises:
        Exception: the first failing rank's, as :func:`mgpu_core.parallel_apply` words it.
    """
    results = _run(job, team, parts)
    if job.backward and results and all(loss.is_constant for loss, _ in results):
        raise RuntimeError("the loss does not depend on any parameter that requires grad: there is nothing to train")
    return results


def _run(job: Pass, team: Team, parts: Sequence[RankPart | None]) -> list[tuple[RankLoss, Any]]:
    works = [_Work(job, rank, team.devices[rank]) for rank in range(len(parts))]
    if len(team) == 1:  # nobody to share with: in this thread, and failures are the module's own
        device = team.devices[0]
        with on(device, caller_streams([device])[0]):
            return [works[0](part) for part in parts if part is not None]
    inputs = [None if part is None else (part,) for part in parts]
    results = apply_some(works, inputs, team.first(len(parts)), job.rng)
    found = [(result, part) for result, part in zip(results, parts, strict=True) if part is not None]
    if job.backward and job.joint:
        _differentiate_together(*zip(*found, strict=True))
    return [result for result, _ in found]


class _Work:
    """What a rank's worker calls."""

    records_itself = True  # it is more than a forward

    def __init__(self, job: Pass, rank: int, device: torch.device) -> None:
        self._job, self._rank, self._device = job, rank, device

    def __call__(self, part: RankPart) -> tuple[RankLoss, Any]:
        job = self._job
        with job.gate, _timed(job.clocks[self._rank] if job.clocks else None):
            with self._autocast():
                with span("forward", self._rank, self._device):
                    output = job.modules[self._rank](*part.inputs, **part.kwargs)
                loss = self._loss(output, part.target)
            if job.backward and not job.joint:
                with span("backward", self._rank, self._device), _without_autocast():
                    _differentiate([loss], [part.seed])
            return loss, _detached(output) if job.keep_outputs else None

    def _autocast(self) -> AbstractContextManager[object]:
        if self._job.amp_dtype is None:
            return NOTHING
        return torch.autocast(self._device.type, dtype=self._job.amp_dtype)

    def _loss(self, output: Any, target: tuple[Any, ...]) -> RankLoss:
        loss_fn = self._job.loss_fns[self._rank]
        if loss_fn is None:
            return rank_loss(output, self._job.reduction)
        with span("loss", self._rank, self._device):
            return rank_loss(loss_fn(output, *target), self._job.reduction)


@contextmanager
def _clocked(clock: RankClock) -> Iterator[None]:
    clock.start()
    yield
    clock.stop()


def _timed(clock: RankClock | None) -> AbstractContextManager[object]:
    return NOTHING if clock is None else _clocked(clock)


def _differentiate(losses: Sequence[RankLoss], seeds: Sequence[float]) -> None:
    """All at once; detaches them."""
    pairs = [(loss.value, seed) for loss, seed in zip(losses, seeds, strict=True) if loss.value.requires_grad]
    if pairs:
        grads = [None if seed == 1.0 else torch.full_like(value, seed) for value, seed in pairs]
        torch.autograd.backward([value for value, _ in pairs], grads)
    for loss in losses:
        loss.is_constant = not loss.value.requires_grad
        loss.value = loss.value.detach()


def _differentiate_together(results: Sequence[tuple[RankLoss, Any]], parts: Sequence[RankPart]) -> None:
    with span("backward"), _without_autocast():
        _differentiate([loss for loss, _ in results], [part.seed for part in parts])


def _without_autocast() -> AbstractContextManager[object]:
    """Backward runs in the dtypes of its forward; autocast would choose a second time."""
    found = torch.accelerator.current_accelerator()
    kinds = [kind for kind in {"cpu", "cpu" if found is None else found.type} if torch.is_autocast_enabled(kind)]
    if not kinds:
        return NOTHING
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def has_graph(part: RankPart) -> bool:
    """Whether an input of the rank belongs to a graph."""
    if not part.kwargs and all(type(each) is torch.Tensor for each in part.inputs):
        return any(each.requires_grad for each in part.inputs)
    leaves: list[Any] = []
    flatten([part.inputs, part.kwargs], leaves, "inputs", whole=True)
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in leaves)


def _detached(output: Any) -> Any:
    leaves: list[Any] = []
    tree = flatten(output, leaves, "outputs", whole=True)
    return tree.unflatten(iter([each.detach() if isinstance(each, torch.Tensor) else each for each in leaves]))
