"""Look at the labels and the losses of some steps: are the ranks' those of one device?"""

from __future__ import annotations

from typing import Any

import torch

from mgpu_core.parallel.first_calls import Call, FirstCalls
from mgpu_core.parallel.first_calls.labels import LABELLED, OF_A_STEP, Labels
from mgpu_core.pipeline.module import Pipeline
from mgpu_core.ranks.random import random_numbers_kept
from mgpu_core.step.forward_backward import ForwardBackward
from mgpu_core.step.loss_check import (
    LossCheck,
    LossState,
    compare_losses,
    warning_of,
    warning_of_side,
    warning_of_state,
)
from mgpu_core.step.losses import RankLoss, RankPart
from mgpu_core.step.options import Options
from mgpu_core.step.rollback import BufferSnapshot
from mgpu_core.step.window import Window
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.nested import moved

__all__ = ["LossWatch"]


class LossWatch:
    """Looks at the first labels, and compares the losses of calls 1, 2, 4, 8 ... with the loss of all rows.

    Args:
        options: of the step.
        is_exact: the loss is one of torch's own, which is known to be right.

    Attributes:
        is_on: a step is to be made by :meth:`run`.
    """

    def __init__(self, options: Options, *, is_exact: bool) -> None:
        self._options = options
        has_parts = len(options.team) > 1 or isinstance(options.module, Pipeline)
        is_loss_per_rank = options.loss_fn is not None and options.loss_on == "ranks"
        self._calls, self._compares = 0, has_parts and is_loss_per_rank and not is_exact
        is_mean = options.loss_fn is None and options.reduction == "mean"
        self._labels = FirstCalls(*([(Labels(OF_A_STEP), LABELLED)] if has_parts and is_mean else []))
        self.is_on = self._compares or self._labels.go_on

    def run(
        self, passes: ForwardBackward, window: Window, parts: list[RankPart], rows: list[int],
        inputs: tuple[Any, ...], keep_outputs: bool,
    ) -> tuple[list[RankLoss], list[int], list[Any]]:  # fmt: skip
        """Run as :meth:`ForwardBackward.run`, and look."""
        self._calls += 1
        if self._labels.go_on:
            arguments = [(part.inputs, part.kwargs) for part in parts]
            self._labels.end(self._labels.begin(Call(self._options.module, arguments=arguments, rows=rows)))
        self.is_on = self._compares or self._labels.go_on
        if not self._compares or self._calls & (self._calls - 1) or len(parts) == 1:
            return passes.run(window, parts, rows, inputs, keep_outputs)
        state = self._watched_loss(passes, parts[0])
        losses, weighed, outputs = passes.run(window, parts, rows, inputs, True)
        check = self._judge(passes, state, outputs, inputs[-1], losses, rows)
        if check.agrees is False or state.own or state.side:  # otherwise a later call may say more
            self.is_on = self._compares = False
        return losses, weighed, outputs

    def check(self, passes: ForwardBackward, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCheck:
        """Compare the loss of the gathered outputs with the sum of the ranks' on a batch; nothing is changed."""
        parts, rows = passes.split(inputs, kwargs)
        if len(parts) < 2:
            return LossCheck(None, reason="one rank has all rows")
        buffers, state = BufferSnapshot(passes.ranks.modules), self._watched_loss(passes, parts[0])
        buffers.take()
        try:
            with torch.no_grad(), random_numbers_kept(passes.ranks.replicas.devices):
                losses, _, outputs = passes.run(None, parts, rows, inputs, True)
                return self._judge(passes, state, outputs, inputs[-1], losses, rows)
        finally:
            buffers.restore()

    @staticmethod
    def _watched_loss(passes: ForwardBackward, part: RankPart) -> LossState:
        """Return the state of the loss function, which will know whether the loss of a part has changed it."""
        state = LossState(passes.ranks.loss_fn)
        state.begin()
        part.watch = state.in_loss()
        return state

    def _judge(
        self, passes: ForwardBackward, state: LossState, outputs: list[Any], target: Any, losses: list[RankLoss],
        rows: list[int],
    ) -> LossCheck:  # fmt: skip
        """Compare the losses of a call with the loss of all its rows, and warn where they differ.

        A loss that keeps a state, or reads objects that forwards change, is not called again.
        """
        options, ranks = self._options, passes.ranks
        assert options.loss_fn is not None  # without one nothing is checked
        if state.own:
            warn_user(warning_of_state(state, len(losses)))
            return LossCheck(None, reason="the loss keeps a state of its own")
        if state.side:
            if ranks.workers.way == "threads":
                warn_user(warning_of_side(state, gathers=False))
            return LossCheck(None, reason="the loss reads what the forwards change")
        device = ranks.team.devices[0]
        with passes.losses.autocast(device):
            check = compare_losses(
                options.loss_fn, outputs, moved(target, device), losses, rows, options.reduction, passes.losses,
                dim=options.dim, is_half=options.amp_dtype is not None,
            )  # fmt: skip
        if check.agrees is False:
            warn_user(warning_of(check))
        return check
