"""Forward, loss and backward of a pipeline, from a batch to losses and outputs: the micro-batches are its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mgpu_core.pipeline.module import Pipeline
from mgpu_core.pipeline.pipeline_run import PipelineRun
from mgpu_core.ranks.rank_clock import RankClock
from mgpu_core.ranks.run import Run
from mgpu_core.ranks.team import Team
from mgpu_core.step.forward_backward import (
    ForwardBackward,
    RankPart,
    any_has_graph,
    check_losses,
    detached,
    differentiate,
)
from mgpu_core.step.loss import RankLoss
from mgpu_core.step.pipeline_copies import PipelineCopies
from mgpu_core.step.rank_modules import RankModules
from mgpu_core.trees.nested import moved

__all__ = ["PipelinePasses"]


class PipelinePasses(ForwardBackward):
    """The calls of one step over a :class:`mgpu_core.Pipeline` and its copies, with a part per micro-batch."""

    def __init__(self, pipeline: Pipeline, copies: Sequence[Sequence[torch.device]], *args: Any) -> None:
        super().__init__(*args)
        pipelines = [pipeline, *map(pipeline.copy_on, copies)]
        self._copies = PipelineCopies(pipelines)
        self._pipelines = pipelines
        self._heads = Team.of([each.device_ids[0] for each in pipelines])
        self._runs: list[PipelineRun] = []
        self._shares: list[int] = []  # micro-batches of each pipeline

    def split(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[RankPart], list[int]]:
        """Return the inputs of each micro-batch, and its rows: those of the first pipeline come first."""
        chunks, copies = self._pipelines[0].chunks, len(self._pipelines)
        parts, rows = self._split(inputs, kwargs, chunks)
        if len(parts) < copies * chunks:  # as many as rows: each pipeline has a part of them
            chunks = -(-len(parts) // copies)
            parts, rows = self._split(inputs, kwargs, chunks)
        self._shares = [len(parts[begin : begin + chunks]) for begin in range(0, len(parts), chunks)]
        return parts, rows

    def _split(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], chunks: int) -> tuple[list[RankPart], list[int]]:
        self._cut_team = Team.of([head for head in self._heads.devices for _ in range(chunks)])
        return super().split(inputs, kwargs)

    def run_parts(
        self, parts: Sequence[RankPart], clocks: Sequence[RankClock], *, backward: bool, keep_outputs: bool
    ) -> tuple[list[RankLoss], list[Any]]:
        """Run the schedule of each pipeline; return the loss of each micro-batch, and its outputs if they are kept.

        Raises:
            ValueError: an input has a graph, which would end at the first stage.
        """
        if backward and any_has_graph(parts):
            raise ValueError("an input of a step over a pipeline requires grad: its gradient would not be computed")
        self._copies.follow()
        loss_fns = self._loss.of_ranks(len(self._shares)) if isinstance(self._loss, RankModules) else None
        ends, self._runs, begin = [], [], 0
        for index, count in enumerate(self._shares):
            device = self._pipelines[index].device_ids[-1]
            loss_fn = self._loss if loss_fns is None else loss_fns[index]
            part = parts[begin : begin + count]
            ends.append(_Losses(self, loss_fn, device, part, keep_outputs=keep_outputs))
            arguments = [(each.inputs, each.kwargs) for each in part]
            last = ends[-1] if backward else None
            self._runs.append(self._pipelines[index].begin(arguments, last, self.autocast, copy=index))
            begin += count
        self._finish(self._runs)
        if backward:
            self._copies.add_gradients()
        for run, end in zip(self._runs, ends, strict=True):
            for micro_batch, output in enumerate(() if backward else run.outputs):
                with self.autocast(end.device):
                    end.forward(micro_batch, output)
        self._runs = []
        losses = [loss for end in ends for loss in end.losses]
        if self._counts_weights and parts[0].unit:
            self.weights.settle(losses)
        if backward:
            check_losses(losses)
        return losses, [output for end in ends for output in end.outputs]

    def _finish(self, runs: Sequence[PipelineRun]) -> None:
        """Run all pipelines at once, or one after the other in the calling thread."""
        in_caller = self._choice.now == "caller"
        calls = [
            partial(each.finish, run, in_caller=in_caller) for each, run in zip(self._pipelines, runs, strict=False)
        ]
        if len(calls) == 1:
            calls[0]()
            return
        names = [f"copy {index} of the pipeline" for index in range(len(calls))]
        run = Run(self._heads.first(len(calls)), names=names)
        form = self._net.tree.modes, torch.is_grad_enabled()
        run.run(calls, draws=self._draws, form=form, workers="caller" if in_caller else "threads")

    def stop(self, seconds: float) -> bool:
        """Let no action begin any more; return whether all workers have ended in that time."""
        have_ended = [run.stop(seconds) for run in self._runs]
        return all(have_ended)


class _Losses:
    """The end of a pipeline: the losses of its micro-batches."""

    def __init__(
        self, passes: ForwardBackward, loss_fn: Any, device: torch.device, parts: Sequence[RankPart], *,
        keep_outputs: bool,
    ) -> None:  # fmt: skip
        self._passes, self._loss_fn, self.device = passes, loss_fn, device
        self._parts, self._keep_outputs = parts, keep_outputs
        self.losses: list[Any] = [None] * len(parts)
        self.outputs: list[Any] = [None] * len(parts) if keep_outputs else []

    def forward(self, micro_batch: int, output: Any) -> None:
        """Compute the loss of a micro-batch on the last device."""
        part = self._parts[micro_batch]
        part.target = tuple(moved(each, self.device) for each in part.target)
        self.losses[micro_batch] = self._passes.loss_of(output, self._loss_fn, part)
        if self._keep_outputs:
            self.outputs[micro_batch] = detached(output)

    def node(self, micro_batch: int) -> Any:
        """Return its node in autograd's graph."""
        return self.losses[micro_batch].value.grad_fn

    def backward(self, micro_batch: int) -> None:
        """Differentiate it."""
        differentiate([self.losses[micro_batch]], [self._parts[micro_batch].seed])

    def drop(self) -> None:
        """Let go of the losses so far: the call begins again."""
        self.losses = [None] * len(self.losses)
