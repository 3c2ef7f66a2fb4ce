"""Steps as CUDA graphs: the recorded part of a step, and the host's work at each replay.

A recording computes nothing.  Numbers that change from step to step lie in the device's memory, and those that a
recording has fixed are part of its key: shapes, modes, the loss scale.

Where ranks share one device, a graph holds the whole step, from the batch to the update.  Over several devices each has
a graph of forward, backward and the sums over its own ranks: graphs are recorded one after the other, so that none can
wait for another device.  At the end of a bucket it records an event.  The sums over devices are launched in every step,
as ever, and overlap with the graphs; so is the update, of which the kernels of each device are a graph::

    host        copies, launches both graphs ─ launches sum 1 ─ sum 0 ─ update
    device 0    [ forward ─ backward ─ bucket 1, event ── bucket 0, event ]       update
    device 1    [ forward ─ backward ──── bucket 1, event ─── bucket 0, event ]   update
    side                                          [ sum 1 ]          [ sum 0 ]

Of a window of several calls, also on one device, there are graphs of the first call and of one that adds to the sums
that its device has by then; the sums over devices follow the last call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.devices.graphs import GRAPH_DEVICE, CudaRecorder, GraphEvent
from mgpu_core.devices.time_limits import time_limit
from mgpu_core.step.forward_backward import ForwardBackward, detached
from mgpu_core.step.grad_clip import GradientNorm, factor_of, overflow_of, warm_up
from mgpu_core.step.graph_cache import Replay, StaticNest, StepGraphs
from mgpu_core.step.losses import RankLoss, RankPart
from mgpu_core.step.options import Options
from mgpu_core.step.reducer import Gradients, Reducer
from mgpu_core.step.update import Update
from mgpu_core.step.window import Window
from mgpu_core.trace.tracer import span
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
        devices: of the ranks, each once.
    """

    def __init__(self, options: Options, reducer: Reducer, passes: ForwardBackward, update: Update) -> None:
        self.reducer, self.passes, self._update = reducer, passes, update
        self._reduction, self._modules = options.reduction, passes.ranks.modules
        self.graphs, self.recorder = StepGraphs(), CudaRecorder()
        self._kept: list[list[Module]] = []  # of the ranks
        self._tables: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []  # of their tensors
        self.devices = update.replicas.devices
        self._share = len(self.devices) < len(update.replicas.team)  # ranks share a device

    def run(
        self, options: Options, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, collects: bool, keep_outputs: bool
    ) -> torch.Tensor | None:
        """Make a step by a replay; return its loss, or ``None``: it must go the ordinary way.

        The ranks' parameters must be up to date.

        Args:
            options: as they are now.
            inputs, kwargs: of the call.
            collects: the update follows a later call.
            keep_outputs: the outputs are returned.
        """
        is_window = collects or self.window.calls > 0
        is_whole = len(self.devices) == 1 and not is_window
        reasons = (
            self.passes.ranks.why_not_recorded(),
            "gradients are accumulated over several calls, and ranks share a device"
            if is_window and self._share
            else None,
            self._update.why_not_recorded(options, is_whole=is_whole),
            self.passes.split_plan.why_not_recorded(),
            "its outputs are returned" if keep_outputs else None,
        )
        loss: torch.Tensor | None = None
        if reason := next(filter(None, reasons), None):
            self.graphs.skip(reason)
        else:
            batch = inputs, kwargs
            if is_whole:
                loss = self._update.replay(partial(self._replay, batch, options.clip_norm, is_whole=True))
            else:
                loss = self._run_gradients(batch, options, collects=collects)
        if loss is None:
            self.graphs.tell()
        return loss

    def _replay(self, batch: Any, clip_norm: float | None, *, is_whole: bool) -> Any:
        record = partial(self._record, batch, clip_norm, is_whole=is_whole)
        return self.graphs.run(batch, self._fixed(clip_norm, is_whole=is_whole), record)

    def _run_gradients(self, batch: Any, options: Options, *, collects: bool) -> torch.Tensor | None:
        """Replay the gradients of a call; the sums over devices and the update, after the last one, are as ever."""
        window = self._update.begin(options)
        window.is_whole &= not collects
        replayed = self._replay(batch, None, is_whole=False)
        if replayed is None:
            return None
        losses, rows, add_devices = replayed
        add_devices(collects=collects)
        if collects:  # the window keeps the weights, and the next replay writes there
            losses = [RankLoss(each.value, _copied(each.weight)) for each in losses]
        loss = window.add(rows, losses, self.devices[0]).clone()  # of the caller
        if not collects:
            self._update.commit(options, losses)
        return loss

    def _fixed(self, clip_norm: float | None, *, is_whole: bool) -> tuple[Hashable, ...]:
        """Return the settings that a recording fixes, besides the batch."""
        replicas, window = self._update.replicas, self.window
        of_update: tuple[Hashable, ...] = window.calls > 0, window.seeds_from
        if is_whole:
            of_update = tuple(self._update.used), self._update.optimizer_step.memory
        autocast = torch.is_autocast_enabled(GRAPH_DEVICE) and torch.get_autocast_dtype(GRAPH_DEVICE)
        modes = tuple(node.module.training for modules in self._modules for node in modules.tree.nodes)
        first, others = self.tensors()
        tensors = *map(id, first), *map(torch.Tensor.data_ptr, first), *map(id, others)  # the user may say `t.data =`
        frozen, memory = tuple(replicas.frozen), (replicas.moves, replicas.renewals)
        shares, scale = tuple(self.passes.split_plan.shares or ()), self._update.loss_scale.scale
        return modes, frozen, of_update, tensors, memory, shares, clip_norm, autocast, scale

    def _record(self, batch: Any, clip_norm: float | None, *, is_whole: bool) -> Replay:
        try:
            with self._buffers_kept():
                return (_StepGraph if is_whole else _GradientGraphs)(self, batch, clip_norm).replay
        except BaseException:
            self.recorder.forget()
            self.reducer.cancel()
            self.passes.ranks.stop(time_limit())
            self.reducer.drop()
            raise
        finally:
            if is_whole:  # its call is counted
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

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that recordings read, besides the net's parameters: of rank 0, and of the other ranks."""
        kept = [modules.kept for modules in self._modules]
        is_own = kept[0][0] is self._modules[0].module  # of the user's, which may get other layers
        if is_own or kept != self._kept:  # replicas are static
            self._kept, self._tables = kept, ([], [])
            for number, of_ranks in enumerate(kept):
                for rank, module in enumerate(of_ranks):
                    for layer in modules_of(module):
                        self._tables[rank > 0].append(layer._buffers)
                        if number:  # a loss, whose parameters are not the net's
                            self._tables[rank > 0].append(layer._parameters)
        first, others = [list(chain.from_iterable(map(dict.values, tables))) for tables in self._tables]
        return [tensor for tensor in first if tensor is not None], others

    def begin(self) -> None:
        """Open a new window, for one call."""
        self._update.open_window(self._reduction, 1)

    def split(self, batch: Any, *, stays: bool = False) -> tuple[list[RankPart], list[int]]:
        """Return the inputs of each rank, on its device unless they stay where they are, and their rows."""
        inputs, kwargs = batch
        parts, self.passes.split_plan.rows = self.passes.split(inputs, kwargs, stays=stays)
        return parts, self.passes.split_plan.rows

    def compute(self, parts: Sequence[RankPart | None]) -> list[RankLoss]:
        """Run forward, loss and backward of the ranks that have a part, each in the worker that it always has."""
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

    def update(self, norm: GradientNorm, clip_norm: float | None) -> float | torch.Tensor | None:
        """Launch the update, after the sums of the only call; the host does not wait.  Return its factor, unclipped.

        Args:
            norm: of :meth:`norm`.
            clip_norm: the largest norm of all gradients.
        """
        flat = self._update.optimizer_step.flat
        if self._update.loss_scale.is_on:
            flat.hold_back(overflow_of(self.reducer.sums.on(0)))
        factor = self.window.factor(self.window.weight)
        flat.run(factor if clip_norm is None else factor_of(factor, norm.compute(), clip_norm))
        return factor

    def record_update(self) -> None:
        """Let the update of each device be one launch, where the optimizer is one of ours."""
        optimizer_step = self._update.optimizer_step
        if optimizer_step.memory is not None:
            optimizer_step.flat.record(self.recorder)

    @property
    def window(self) -> Window:
        """The call that is recorded or replayed."""
        return self._update.window

    def check_used(self) -> None:
        """Raise RuntimeError unless the same parameters have gradients as in the last update."""
        if self.reducer.used() != self._update.used:
            raise RuntimeError("this batch uses other parameters than the one before")


class _Graphs:
    """Recordings of a step with batches of one kind, which are replayed together.

    Args:
        steps: of the step.
        batch: of the first replay.
        clip_norm: the largest norm of all gradients.
    """

    def __init__(self, steps: CapturedSteps, batch: Any, clip_norm: float | None) -> None:
        self._steps: CapturedSteps = weakref.proxy(steps)  # which has this
        self._clip_norm = clip_norm
        parts, self._rows = steps.split(batch)
        devices = steps.passes.ranks.team.devices
        self._batch = [StaticNest(_nest_of(part), device) for part, device in zip(parts, devices, strict=False)]
        self._parts = [RankPart(*static.nest) for static in self._batch]
        self._tensors = steps.tensors()  # whose memory the graphs read

    def _part(self, rank: int) -> RankPart:
        """Return the part of a rank, in tensors that its forward may mark (``x.requires_grad_()``)."""
        inputs, kwargs, target = detached(self._batch[rank].nest)
        return replace(self._parts[rank], inputs=inputs, kwargs=kwargs, target=target)

    def _fill(self, batch: Any) -> None:
        """Copy a batch to where the graphs read it."""
        parts, _ = self._steps.split(batch, stays=True)
        for static, part in zip(self._batch, parts, strict=True):
            static.fill(_nest_of(part))


class _StepGraph(_Graphs):
    """A graph of the ranks of one device, with their update."""

    def __init__(self, steps: CapturedSteps, batch: Any, clip_norm: float | None) -> None:
        super().__init__(steps, batch, clip_norm)
        self._norm = steps.norm()
        self._factor: float | torch.Tensor | None = None
        self._graph, (self._loss, *factors) = steps.recorder.record(steps.devices[0], self._work)
        self._factor = next(iter(factors), self._factor)
        steps.check_used()

    def _work(self) -> list[torch.Tensor]:
        steps, ranks = self._steps, range(len(self._parts))
        steps.begin()
        steps.window.seed(self._parts, self._rows)
        steps.reducer.begin(len(ranks), overlap=True, goes_on=False)
        losses = steps.compute(list(map(self._part, ranks)))
        steps.reducer.sum_the_rest()
        loss = steps.window.add(self._rows, losses, steps.devices[0])
        self._factor = steps.update(self._norm, self._clip_norm)
        return [loss, self._factor] if isinstance(self._factor, torch.Tensor) else [loss]

    def replay(self, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor | None]:
        """Make the step; return its loss, and the factor of its update before clipping."""
        self._fill(batch)
        self._graph.replay()
        return self._loss.clone(), self._factor


class _GradientGraphs(_Graphs):
    """A graph per device, of the passes of its ranks and the sums over them."""

    def __init__(self, steps: CapturedSteps, batch: Any, clip_norm: float | None) -> None:
        super().__init__(steps, batch, clip_norm)
        present = range(len(self._parts))
        self._ranks_of = [[rank for rank in ranks if rank in present] for ranks in steps.passes.ranks.replicas.ranks_of]
        self._adds = steps.window.calls > 0
        if self._adds:
            steps.reducer.keep()
        self._events: dict[int, dict[int, GraphEvent]] = {}  # by bucket, as they become ready, and device
        self._every_event: list[GraphEvent] = []  # which the graphs record
        self._used: set[int] = set()
        self._recorded: dict[int, RankLoss] = {}  # by rank
        self._graphs = [steps.recorder.record(device, partial(self._work, i)) for i, device in enumerate(steps.devices)]
        if len({loss.weight is None for loss in self._recorded.values()}) > 1:
            raise RuntimeError("the losses of some ranks are means over labels, and those of others are not")
        numbers = [tensor for _, tensors in self._graphs for tensor in tensors]
        losses: dict[int, RankLoss] = {}
        for rank, loss in self._recorded.items():
            value, weight = numbers.pop(0), loss.weight
            losses[rank] = RankLoss(value, numbers.pop(0) if isinstance(weight, torch.Tensor) else weight)
        self._losses = [losses[rank] for rank in present]
        if len(steps.devices) > 1:  # otherwise it is a part of other graphs
            steps.record_update()

    def _work(self, index: int) -> list[torch.Tensor]:
        steps, ranks, present = self._steps, self._ranks_of[index], range(len(self._parts))
        steps.window.seed(self._parts, self._rows)
        steps.reducer.begin_recording(index, len(present), self._mark, goes_on=self._adds)
        parts = [self._part(rank) if rank in ranks else None for rank in present]
        losses = steps.compute(parts) if ranks else []
        self._used |= steps.reducer.end_recording(index)
        self._recorded.update(zip(ranks, losses, strict=True))
        return [each for loss in losses for each in (loss.value, loss.weight) if isinstance(each, torch.Tensor)]

    def _mark(self, bucket: int, stream: torch.Stream) -> None:
        """Record an event after a sum over the ranks of a device; a later one of the same bucket has another event."""
        event = self._steps.recorder.event()
        event.record(stream)
        self._events[bucket] = {**self._events.pop(bucket, {}), stream.device_index: event}  # now the last one
        self._every_event.append(event)

    def _wait(self, bucket: int, stream: torch.Stream) -> None:
        self._events[bucket][stream.device_index].wait(stream)

    def replay(self, batch: Any) -> tuple[list[RankLoss], list[int], Callable[..., None]]:
        """Make the gradients; return each rank's loss and rows, and what sums them over the devices."""
        steps = self._steps
        self._fill(batch)
        steps.window.seed(self._parts, self._rows)
        if self._adds:
            steps.reducer.keep()
        with span("replay"):
            for graph, _ in self._graphs:
                graph.replay()
        return self._losses, self._rows, partial(steps.reducer.add_replayed, [*self._events], self._used, self._wait)


def _copied(weight: Any) -> Any:
    return weight.clone() if isinstance(weight, torch.Tensor) else weight


def _nest_of(part: RankPart) -> tuple[Any, ...]:
    return part.inputs, part.kwargs, part.target


def captured_steps(
    options: Options, gradients: Gradients, passes: ForwardBackward, update: Update
) -> CapturedSteps | None:
    """Return the recordings of a step; ``None``: it is to have none."""
    if options.capture and isinstance(gradients, Reducer):
        return CapturedSteps(options, gradients, passes, update)
    return None
