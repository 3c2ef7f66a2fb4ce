"""Forward, loss and backward of a step over a pipeline: the micro-batches are its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.pipeline.module import Pipeline
from mgpu_core.ranks.rank_clock import RankClock
from mgpu_core.step.forward_backward import (
    ForwardBackward,
    any_has_graph,
    check_losses,
    detached,
    differentiate,
    pass_over_ranks,
)
from mgpu_core.step.losses import Losses, RankLoss, RankPart
from mgpu_core.step.options import Options
from mgpu_core.step.ranks import Ranks
from mgpu_core.step.split_plan import SplitPlan
from mgpu_core.trees.nested import moved

__all__ = ["passes_of", "why_not_over_pipeline"]


def passes_of(options: Options, ranks: Ranks, split_plan: SplitPlan) -> ForwardBackward:
    """Return the passes of a step: over the stages of a Pipeline, if that is its module, otherwise over its ranks."""
    way = _pass_over_pipeline if isinstance(options.module, Pipeline) else pass_over_ranks
    return ForwardBackward(options, ranks, split_plan, way)


def _pass_over_pipeline(
    ranks: Ranks,
    losses: Losses,
    parts: Sequence[RankPart],
    _: Sequence[RankClock],
    *,
    backward: bool,
    keep_outputs: bool,
) -> tuple[list[RankLoss], list[Any]]:
    """Run the schedule of a pipeline; return the loss of each micro-batch, and its outputs if they are kept.

    Args:
        ranks: of a step over a Pipeline.
        losses, backward, keep_outputs: as for :func:`pass_over_ranks`.
        parts: one per micro-batch.

    Raises:
        ValueError: an input has a graph, which would end at the first stage.
    """
    if backward and any_has_graph(parts):
        raise ValueError("an input of a step over a pipeline requires grad: its gradient would not be computed")
    pipeline = ranks.net.module
    assert isinstance(pipeline, Pipeline)
    end = _End(losses, ranks.loss_fn, pipeline.device_ids[-1], parts, keep_outputs=keep_outputs)
    arguments = [(part.inputs, part.kwargs) for part in parts]
    run = ranks.at_work = pipeline.begin(arguments, end if backward else None, losses.autocast)
    pipeline.finish(run, in_caller=ranks.usual_workers.way == "caller")
    for micro_batch, output in enumerate(() if backward else run.outputs):
        with losses.autocast(end.device):
            end.forward(micro_batch, output)
    ranks.at_work = None
    if losses.counts and parts[0].unit:
        losses.settle(end.losses)
    if backward:
        check_losses(end.losses)
    return end.losses, end.outputs


class _End:
    """The end of a pipeline: the losses of its micro-batches."""

    def __init__(
        self, losses: Losses, loss_fn: Any, device: torch.device, parts: Sequence[RankPart], *, keep_outputs: bool
    ) -> None:
        self._losses, self._loss_fn, self.device = losses, loss_fn, device
        self._parts, self._keep_outputs = parts, keep_outputs
        self.losses: list[Any] = [None] * len(parts)
        self.outputs: list[Any] = [None] * len(parts) if keep_outputs else []

    def forward(self, micro_batch: int, output: Any) -> None:
        """Compute the loss of a micro-batch on the last device."""
        part = self._parts[micro_batch]
        part.target = tuple(moved(target, self.device) for target in part.target)
        self.losses[micro_batch] = self._losses.of(output, self._loss_fn, part)
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


def why_not_over_pipeline(options: Options) -> str | None:
    """Return which argument a step over a Pipeline does not take; ``None``: it takes all, or is over no Pipeline."""
    names = "process_group", 'loss_on="gathered"', "shard", "static_graph", "capture", "dim"
    return options.why_not_over(Pipeline, *names)
