"""Whole steps as CUDA graphs: the recorded part of a step, and the host's work at each replay.

A graph holds a step of ranks that share a device, from the batch to the update; a recording computes nothing.  Numbers
that change from step to step lie in the device's memory, and those that a recording has fixed are part of its key:
shapes, modes, the loss scale.  Steps over several devices go the ordinary way: collectives of several GPUs in one
process cannot be part of graphs that are recorded one after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mgpu_core.devices.graphs import GRAPH_DEVICE, CudaRecorder
from mgpu_core.devices.time_limits import time_limit
from mgpu_core.step.forward_backward import ForwardBackward
from mgpu_core.step.grad_clip import GradientNorm, factor_of, overflow_of, warm_up
from mgpu_core.step.graph_cache import Replay, StaticNest, StepGraphs
from mgpu_core.step.losses import RankLoss, RankPart
from mgpu_core.step.options import Options
from mgpu_core.step.reducer import Gradients, Reducer
from mgpu_core.step.update import Update
from mgpu_core.step.window import Window
from mgpu_core.trees.module_tree import modules_of

__all__ = ["CapturedSteps", "captured_steps"]


class CapturedSteps:
    """The steps of a :class:`mgpu_core.TrainStep` that are replays.

    Args:
        options, reducer, passes, update: of the step.

    Attributes:
        reducer, passes: the same.
        graphs: the recorded graphs.
        recorder: records the work of one device.
    """

    def __init__(self, options: Options, reducer: Reducer, passes: ForwardBackward, update: Update) -> None:
        self.reducer, self.passes, self._update = reducer, passes, update
        self._reduction, self._modules = options.reduction, passes.ranks.modules
        self.graphs, self.recorder = StepGraphs(), CudaRecorder()

    @property
    def device(self) -> torch.device:
        """The device of all ranks."""
        return self._update.replicas.devices[0]

    def run(
        self, options: Options, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, collects: bool, keep_outputs: bool
    ) -> torch.Tensor | None:
        """Make a step by a replay; return its loss, or ``None``: it must go the ordinary way.

        The ranks' parameters must be up to date.

        Args:
            options: as they are now.
            inputs, kwargs: of the call.
            collects: gradients are accumulated over several calls.
            keep_outputs: the outputs are returned.
        """
        reasons = (
            self.passes.ranks.why_not_recorded(),
            "gradients are accumulated over several calls" if collects else None,
            self._update.why_not_recorded(options),
            self.passes.split_plan.why_not_recorded(),
            "its outputs are returned" if keep_outputs else None,
        )
        batch, clip_norm, loss = (inputs, kwargs), options.clip_norm, None
        if reason := next(filter(None, reasons), None):
            self.graphs.skip(reason)
        else:
            loss = self._update.replay(
                lambda: self.graphs.run(batch, self._fixed(clip_norm), lambda: self._record(batch, clip_norm))
            )
        if loss is None:
            self.graphs.tell()
        return loss

    def _fixed(self, clip_norm: float | None) -> tuple[Hashable, ...]:
        """Return the settings that a recording fixes, besides the batch."""
        replicas, optimizer_step = self._update.replicas, self._update.optimizer_step
        autocast = torch.is_autocast_enabled(GRAPH_DEVICE) and torch.get_autocast_dtype(GRAPH_DEVICE)
        modes = tuple(node.module.training for modules in self._modules for node in modules.tree.nodes)
        frozen, used, buffers = tuple(replicas.frozen), tuple(self._update.used), tuple(map(id, self.buffers))
        memory = optimizer_step.memory, replicas.moves, replicas.renewals
        shares = tuple(self.passes.split_plan.shares or ())
        return modes, frozen, used, buffers, memory, shares, clip_norm, autocast, self._update.loss_scale.scale

    def _record(self, batch: Any, clip_norm: float | None) -> Replay:
        try:
            with self._buffers_kept():
                return _Graph(self, batch, clip_norm).replay
        except BaseException:
            self.recorder.forget()
            self.reducer.cancel()
            self.passes.ranks.stop(time_limit())
            self.reducer.abandon()
            raise
        finally:
            self.begin()

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Raise RuntimeError if a recording, which computes nothing, puts another tensor in place of a buffer."""
        before = [
            (module._buffers, name, buffer)
            for modules in self._modules
            for module in modules_of(modules.kept[0])
            for name, buffer in module._buffers.items()
            if buffer is not None
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
            raise RuntimeError(f"the forward puts another tensor in place of buffer {replaced[0]}")

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of all ranks: a recording reads their memory, so it keeps them."""
        return [buffer for modules in self._modules for each in modules.kept for buffer in each.buffers()]

    def begin(self) -> None:
        """Open a new window, for one call."""
        self._update.open_window(self._reduction, 1)

    def split(self, batch: Any) -> tuple[list[RankPart], list[int]]:
        """Return the inputs of each rank, and their rows."""
        inputs, kwargs = batch
        parts, self.passes.split_plan.rows = self.passes.split(inputs, kwargs)
        return parts, self.passes.split_plan.rows

    def compute(self, parts: Sequence[RankPart]) -> list[RankLoss]:
        """Run forward, loss and backward of the ranks, each in the worker that it always has."""
        self.reducer.begin(len(parts), overlap=True, goes_on=False)
        with torch.enable_grad():
            losses: list[RankLoss] = self.passes.run_parts(parts, (), backward=True, keep_outputs=False)[0]
        if self._update.replicas.settle():
            raise RuntimeError("the forward gives a parameter other memory")
        return losses

    def norm(self) -> GradientNorm:
        """Return the norm of the sums; :meth:`update` can be captured from now on."""
        sums = self.reducer.sums.on(0)
        warm_up(sums)
        return GradientNorm(sums)

    def update(self, norm: GradientNorm, clip_norm: float | None) -> None:
        """Launch the update, after the sums of the only call; the host does not wait.

        Args:
            norm: of :meth:`norm`.
            clip_norm: the largest norm of all gradients.
        """
        flat = self._update.optimizer_step.flat
        if self._update.loss_scale.is_on:
            flat.hold_back(overflow_of(self.reducer.sums.on(0)))
        factor = self.window.factor(self.window.weight)
        if clip_norm is not None:
            factor = factor_of(factor, norm.compute(), clip_norm)
        flat.run(factor)

    @property
    def window(self) -> Window:
        """The call that is recorded or replayed."""
        return self._update.window

    def check_used(self) -> None:
        """Raise RuntimeError unless the same parameters have gradients as in the last update."""
        if self.reducer.used() != self._update.used:
            raise RuntimeError("this batch uses other parameters than the one before")


class _Graph:
    """A recorded step, from a batch on the device to the update."""

    def __init__(self, steps: CapturedSteps, batch: Any, clip_norm: float | None) -> None:
        self._steps: CapturedSteps = weakref.proxy(steps)  # which has this
        self._clip_norm = clip_norm
        self._device = steps.device
        self._batch = StaticNest(batch, self._device)
        self._buffers = steps.buffers
        self._norm = steps.norm()
        self._graph, (self._loss,) = steps.recorder.record(self._device, self._work)
        steps.check_used()

    def _work(self) -> list[torch.Tensor]:
        steps = self._steps
        steps.begin()
        parts, rows = steps.split(self._batch.nest)
        steps.window.seed(parts, rows)
        losses = steps.compute(parts)
        steps.reducer.sum_the_rest()
        loss = steps.window.add(rows, losses, self._device)
        steps.update(self._norm, self._clip_norm)
        return [loss]

    def replay(self, batch: Any) -> torch.Tensor:
        self._batch.fill(batch)
        self._graph.replay()
        return self._loss.clone()


def captured_steps(
    options: Options, gradients: Gradients, passes: ForwardBackward, update: Update
) -> CapturedSteps | None:
    """Return the recordings of a step; ``None``: it is to have none."""
    if options.capture and isinstance(gradients, Reducer):
        return CapturedSteps(options, gradients, passes, update)
    return None
