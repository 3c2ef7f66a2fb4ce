"""Whole steps as CUDA graphs: what is recorded of a step, and what the host still does at each replay.

A graph holds what one device does between two updates; a recording computes nothing.  Numbers that change from step to
step lie in the device's memory, and those that a recording has fixed are part of its key: shapes, modes, the loss
scale.  Where all ranks share a device there is one graph, from the batch to the update.  Over several devices, each has
two: forward, loss, backward and the sums over its own ranks; and the update.  Between them the host lets the devices
sum, in the ordinary way, since collectives of several GPUs in one process cannot be part of graphs that are recorded
one after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mgpu_core.device.streams import caller_streams
from mgpu_core.device.workers import time_limit
from mgpu_core.train.balance import SplitPlan
from mgpu_core.train.cycle import Cycle
from mgpu_core.train.forward_backward import ForwardBackward, RankPart, seed
from mgpu_core.train.grad_scaler import LossScale
from mgpu_core.train.graph_cache import GRAPH_DEVICE, Recording, StaticNest, StepGraphs
from mgpu_core.train.graph_recorder import CudaRecorder, Launch, Recorder
from mgpu_core.train.loss import RankLoss
from mgpu_core.train.rank_modules import RankModules
from mgpu_core.train.reducer import GradientSync
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.updates import Updates

__all__ = ["CapturedSteps"]


class CapturedSteps:
    """The steps of a :class:`mgpu_core.TrainStep` that are replays.

    Args:
        replicas, modules, sync, updates, passes, cycle, split_plan, loss_scale: of the step.
        reduction: what its loss function returns.

    Attributes:
        graphs: what was recorded.
        recorder: what records.
    """

    def __init__(
        self,
        replicas: Replicas,
        modules: Sequence[RankModules],
        sync: GradientSync,
        updates: Updates,
        passes: ForwardBackward,
        cycle: Cycle,
        split_plan: SplitPlan,
        loss_scale: LossScale,
        reduction: str,
    ) -> None:
        self.replicas, self.sync, self.passes, self.cycle = replicas, sync, passes, cycle
        self._modules = modules
        self._updates, self._split_plan, self._loss_scale = updates, split_plan, loss_scale
        self._reduction = reduction
        self.graphs = StepGraphs()
        self.recorder: Recorder = CudaRecorder()

    def run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], clip_norm: float | None) -> torch.Tensor | None:
        """The loss of a step that was a replay; ``None``: this one must go the ordinary way.

        The ranks' parameters are up to date.
        """
        batch = inputs, kwargs
        return self.cycle.replayed(
            lambda: self.graphs.run(batch, self._fixed(clip_norm), lambda: self._record(batch, clip_norm))
        )

    def _fixed(self, clip_norm: float | None) -> tuple[Hashable, ...]:
        """What a recording fixes, besides the batch."""
        autocast = torch.is_autocast_enabled(GRAPH_DEVICE) and torch.get_autocast_dtype(GRAPH_DEVICE)
        used, memory = tuple(self.cycle.used), (self._updates.memory, self.replicas.moves)
        buffers = tuple(map(id, self.buffers))
        modes = [node.module.training for modules in self._modules for node in modules.tree.nodes]
        shares = tuple(self._split_plan.shares or ())
        return (
            tuple(modes),
            tuple(self.replicas.frozen),
            buffers,
            used,
            memory,
            shares,
            clip_norm,
            autocast,
            self._loss_scale.scale,
        )

    def _record(self, batch: Any, clip_norm: float | None) -> Recording:
        kind = _OneGraph if len(self.replicas.devices) == 1 else _GraphsPerDevice
        try:
            with self._buffers_kept():
                return kind(self, batch, clip_norm)
        except BaseException:
            self.recorder.forget()
            self.sync.cancel()
            self.passes.stop(time_limit())
            self.sync.abandon()
            raise
        finally:
            self.begin()

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Raise RuntimeError if a recording, which computes nothing, puts another tensor in the place of a buffer."""
        before = [
            (node.module._buffers, name, node.module._buffers[name])
            for modules in self._modules
            for node in modules.tree.nodes
            for name, _ in node.buffers
        ]
        replaced = []
        try:
            yield
        finally:
            for buffers, name, buffer in before:
                if buffers.get(name) is not buffer:
                    buffers[name] = buffer
                    replaced.append(name)
        if replaced:
            raise RuntimeError(f"the forward puts another tensor in the place of buffer {replaced[0]}")

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Of all ranks: a recording reads their memory, so it keeps them."""
        return [buffer for modules in self._modules for each in modules.kept for buffer in each.buffers()]

    def begin(self) -> None:
        """A new window, for one call."""
        self.cycle.open_window(self._reduction, 1)

    def split(self, batch: Any) -> tuple[list[RankPart], list[int]]:
        """What each rank works on, and its rows."""
        inputs, kwargs = batch
        parts, rows = self.passes.split(inputs, kwargs, self._split_plan.shares)
        self._split_plan.done(rows, ())
        return parts, rows

    def compute(self, parts: Sequence[RankPart | None], *, overlap: bool) -> list[RankLoss]:
        """Forward, loss and backward of the ranks that have parts, each in the worker that it always has."""
        self.sync.begin(len(parts), overlap=overlap, streams=caller_streams(self.replicas.team.devices))
        with torch.enable_grad():
            losses, _ = self.passes.run(parts, (), backward=True, keep_outputs=False)
        if self.replicas.settle():
            raise RuntimeError("the forward gives a parameter other memory")
        return losses


class _OneGraph:
    """A step of ranks that share a device: one graph, from a batch on that device to the update."""

    def __init__(self, steps: CapturedSteps, batch: Any, clip_norm: float | None) -> None:
        self._steps: CapturedSteps = weakref.proxy(steps)  # which has this
        self._clip_norm = clip_norm
        self._device = steps.replicas.devices[0]
        self._batch = StaticNest(batch, self._device)
        self._buffers = steps.buffers
        self._norm = steps.cycle.norm_on(0)
        self._graph, (self._loss,) = steps.recorder.record(self._device, self._work)
        steps.cycle.check_used()

    def _work(self) -> list[torch.Tensor]:
        steps = self._steps
        steps.begin()
        steps.sync.clear()
        parts, rows = steps.split(self._batch.nest)
        seed(parts, steps.cycle.window.seeds(rows))
        losses = steps.compute(parts, overlap=True)
        steps.sync.finish()
        loss = steps.cycle.window.add(rows, losses, self._device)
        steps.cycle.work_on(0, self._norm, steps.cycle.window.weight, self._clip_norm)
        return [loss]

    def replay(self, batch: Any) -> torch.Tensor:
        self._batch.fill(batch)
        self._graph.replay()
        return self._loss.clone()


class _GraphsPerDevice:
    """A step over several devices: per device a graph for its ranks, and one for its update."""

    def __init__(self, steps: CapturedSteps, batch: Any, clip_norm: float | None) -> None:
        self._steps: CapturedSteps = weakref.proxy(steps)  # which has this
        self._clip_norm = clip_norm
        self._devices = steps.replicas.devices
        self._buffers = steps.buffers
        steps.begin()
        parts, rows = steps.split(batch)
        self._batches = [StaticNest(_nest_of(part)) for part in parts]
        self._parts = [_part_of(each.nest) for each in self._batches]
        self._losses: dict[int, RankLoss] = {}
        places = range(len(self._devices))
        seed(self._parts, steps.cycle.window.seeds(rows))
        self._computing = [self._recorded_computing(place) for place in places]
        steps.cycle.check_used()
        self._weights = self._weights_of(self._add_losses(rows))
        self._norms = [steps.cycle.norm_on(place) for place in places]
        self._updating = [self._recorded_update(place) for place in places]

    def _recorded_computing(self, place: int) -> Launch:
        ranks = [rank for rank in self._steps.replicas.ranks_of[place] if rank < len(self._parts)]
        work = partial(self._compute, place, ranks)
        graph, tensors = self._steps.recorder.record(self._devices[place], work)
        self._losses |= zip(ranks, map(RankLoss, *_halves(tensors, len(ranks))), strict=True)
        return graph

    def _compute(self, place: int, ranks: Sequence[int]) -> list[torch.Tensor]:
        """Launches the ranks of one device, and their sums: their losses, then the weights beside them, if any."""
        steps = self._steps
        steps.sync.clear(steps.replicas.ranks_of[place])
        parts = [part if rank in ranks else None for rank, part in enumerate(self._parts)]
        losses = steps.compute(parts, overlap=False) if ranks else []
        steps.sync.layout.of_buckets.add_up_all_ranks(place)
        return [each.value for each in losses] + [each.weight for each in losses if each.weight is not None]

    def _recorded_update(self, place: int) -> Launch:
        graph, _ = self._steps.recorder.record(self._devices[place], partial(self._update, place))
        return graph

    def _update(self, place: int) -> list[torch.Tensor]:
        cycle = self._steps.cycle
        weight = self._weights[place] if self._weights else cycle.window.weight
        cycle.work_on(place, self._norms[place], weight, self._clip_norm)
        return []

    def _add_losses(self, rows: Sequence[int]) -> torch.Tensor:
        """The loss of all ranks; counts the call."""
        losses = [self._losses[rank] for rank in range(len(self._parts))]
        return self._steps.cycle.window.add(rows, losses, self._devices[0])

    def _weights_of(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Per device where the update reads what the call weighs; none, where that is a number of rows."""
        if not isinstance(self._steps.cycle.window.weight, torch.Tensor):
            return []
        return [torch.ones((), dtype=loss.dtype, device=device) for device in self._devices]

    def replay(self, batch: Any) -> torch.Tensor:
        steps = self._steps
        steps.begin()
        parts, rows = steps.split(batch)
        for static, part in zip(self._batches, parts, strict=True):
            static.fill(_nest_of(part))
        seed(self._parts, steps.cycle.window.seeds(rows))
        for graph in self._computing:
            graph.replay()
        loss = self._add_losses(rows).clone()
        steps.sync.layout.of_buckets.add_up_all_devices()
        total = steps.cycle.window.weight
        for weight in self._weights:
            weight.copy_(torch.as_tensor(total), non_blocking=True)
        for graph in self._updating:
            graph.replay()
        return loss


def _halves(tensors: list[torch.Tensor], count: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
    """Of so many ranks the losses, and the weights beside them, if any."""
    return tensors[:count], tensors[count:] or [None] * count


def _nest_of(part: RankPart) -> tuple[Any, ...]:
    return part.inputs, part.kwargs, part.target


def _part_of(nest: tuple[Any, ...]) -> RankPart:
    inputs, kwargs, target = nest
    return RankPart(inputs, kwargs, target, seed=1.0)
