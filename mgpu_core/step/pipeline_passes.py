"""Forward, loss and backward of a pipeline, from a batch to losses and outputs: the micro-batches are its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.pipeline.module import Pipeline
from mgpu_core.pipeline.pipeline_run import PipelineRun
from mgpu_core.ranks.rank_clock import RankClock
from mgpu_core.step.forward_backward import (
    ForwardBackward,
    RankPart,
    any_has_graph,
    check_losses,
    detached,
    differentiate,
)
from mgpu_core.step.loss import RankLoss
from mgpu_core.step.rank_modules import RankModules
from mgpu_core.trees.nested import moved

__all__ = ["PipelinePasses"]


class PipelinePasses(ForwardBackward):
    """The calls of one step over a :class:`mgpu_core.Pipeline`, with a part per micro-batch."""

    def __init__(self, pipeline: Pipeline, *args: Any) -> None:
        super().__init__(*args)
        self._pipeline = pipeline
        self._pipeline_run: PipelineRun | None = None

    def split(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[RankPart], list[int]]:
        """Return the inputs of each micro-batch, and its rows."""
        self._cut_devices = self._pipeline.device_ids[:1] * self._pipeline.chunks
        return super().split(inputs, kwargs)

    def run_parts(
        self, parts: Sequence[RankPart], clocks: Sequence[RankClock], *, backward: bool, keep_outputs: bool
    ) -> tuple[list[RankLoss], list[Any]]:
        """Run the schedule; return the loss of each micro-batch, and its outputs if they are kept.

        Raises:
            ValueError: an input has a graph, which would end at the first stage.
        """
        if backward and any_has_graph(parts):
            raise ValueError("an input of a step over a pipeline requires grad: its gradient would not be computed")
        pipeline, loss = self._pipeline, self._loss
        loss_fn = loss.of_ranks(1)[0] if isinstance(loss, RankModules) else loss
        end = _Losses(self, loss_fn, pipeline.device_ids[-1], parts, keep_outputs=keep_outputs)
        arguments = [(part.inputs, part.kwargs) for part in parts]
        run = self._pipeline_run = pipeline.begin(arguments, end if backward else None, self.autocast)
        pipeline.finish(run, in_caller=self._usual_workers.way == "caller")
        for micro_batch, output in enumerate(() if backward else run.outputs):
            with self.autocast(end.device):
                end.forward(micro_batch, output)
        self._pipeline_run = None
        if self._counts_weights and parts[0].unit:
            self.weights.settle(end.losses)
        if backward:
            check_losses(end.losses)
        return end.losses, end.outputs

    def stop(self, seconds: float) -> bool:
        """Let no action begin any more; return whether all lanes have ended in that time."""
        return self._pipeline_run is None or self._pipeline_run.stop(seconds)


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
