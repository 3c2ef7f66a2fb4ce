"""Forward, loss and backward of a pipeline, from a batch to losses and outputs: the micro-batches are its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mgpu_core.device.clock import RankClock
from mgpu_core.device.team import Team
from mgpu_core.nested import moved
from mgpu_core.pipeline.module import Pipeline
from mgpu_core.pipeline.run import PipelineRun
from mgpu_core.train.forward_backward import (
    ForwardBackward,
    RankPart,
    any_has_graph,
    check_losses,
    detached,
    differentiate,
)
from mgpu_core.train.loss import RankLoss, output_loss, rank_loss

__all__ = ["PipelinePasses"]


class PipelinePasses(ForwardBackward):
    """The calls of one step over a :class:`mgpu_core.Pipeline`; as for ranks, with a part per micro-batch."""

    def __init__(self, pipeline: Pipeline, *args: Any) -> None:
        super().__init__(*args)
        self._pipeline = pipeline
        self._cut_team = Team.of([pipeline.device_ids[0]] * pipeline.chunks)
        self._run: PipelineRun | None = None

    def run_parts(
        self, parts: Sequence[RankPart | None], clocks: Sequence[RankClock], *, backward: bool, keep_outputs: bool
    ) -> tuple[list[RankLoss], list[Any]]:
        """Run the schedule; return the loss of each micro-batch, and its outputs if they are kept.

        Raises:
            ValueError: an input has a graph, which would end at the first stage.
        """
        given = [part for part in parts if part is not None]
        if backward and any_has_graph(given):
            raise ValueError("an input of a step over a pipeline requires grad: its gradient would not be computed")
        last = _Losses(self, given, keep_outputs=keep_outputs)
        arguments = [(part.inputs, part.kwargs) for part in given]
        self._run = run = self._pipeline.begin(arguments, last if backward else None, self.autocast)
        self._pipeline.finish(run, in_caller=self._choice.now == "caller")
        if backward:
            check_losses(last.losses)
        else:
            for micro_batch, output in enumerate(run.outputs):
                with self.autocast(self._team.devices[0]):
                    last.forward(micro_batch, output)
        self._run = None
        return last.losses, last.outputs

    def stop(self, seconds: float) -> bool:
        """Let no action begin any more; return whether all workers have ended in that time."""
        return self._run is None or self._run.stop(seconds)

    def loss_of(self, output: Any, part: RankPart) -> RankLoss:
        """Return the loss of a micro-batch on the last device."""
        if self._alone is None:
            return rank_loss(output_loss(output), self._reduction)
        target = [moved(each, self._team.devices[0]) for each in part.target]
        return rank_loss(self._alone(output, *target), self._reduction)


class _Losses:
    """The end of the pipeline: the losses of the micro-batches."""

    def __init__(self, passes: PipelinePasses, parts: Sequence[RankPart], *, keep_outputs: bool) -> None:
        self._passes, self._parts, self._keep_outputs = passes, parts, keep_outputs
        self.losses: list[Any] = [None] * len(parts)
        self.outputs: list[Any] = [None] * len(parts) if keep_outputs else []

    def forward(self, micro_batch: int, output: Any) -> None:
        """Compute the loss of a micro-batch."""
        self.losses[micro_batch] = self._passes.loss_of(output, self._parts[micro_batch])
        if self._keep_outputs:
            self.outputs[micro_batch] = detached(output)

    def backward(self, micro_batch: int) -> None:
        """Differentiate it."""
        differentiate([self.losses[micro_batch]], [self._parts[micro_batch].seed])
