"""The layer: its ranks meet in the forward, and each follows the statistics of all."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mgpu_core.parallel.sync_batchnorm.joint import of_all_ranks
from mgpu_core.ranks.compiled import outside_the_compiler
from mgpu_core.ranks.run import current_lane

__all__ = ["SyncBatchNorm"]

_numbers = count()


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm1d``, ``2d`` and ``3d`` whose batch is all ranks' rows of this forward.

    In :class:`mgpu_core.DataParallel`, :func:`mgpu_core.parallel_apply` and :class:`mgpu_core.TrainStep`.  With one
    rank, in ``eval()`` and outside of these it is the plain layer.  Every rank's running statistics are the team's.
    Made by :func:`convert_sync_batchnorm`.

    Raises:
        ValueError: another number of channels than the layer has.
        RuntimeError: run again in a backward (inside a checkpoint), where the ranks cannot meet.
        Error: a rank ended, or did not come in time.
    """

    ranks_meet = True  # read by ModuleTree: a step gives such a module threads, and one backward for all ranks

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        self.number = next(_numbers)  # the same in all ranks' copies: by it they find each other
        # In the last forward, which may run again; in a list, because a replica's own attributes would be lost.
        self._met = [False]

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  # torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")
        values = {"weight": self.weight, "bias": self.bias, "running_mean": self.running_mean}
        for name, value in values.items():
            if value is not None and value.numel() != input.shape[1]:
                raise ValueError(
                    f"expected {value.numel()} channels in dimension 1, one per number of {name}, got {input.shape[1]} "
                    f"in an input of shape {tuple(input.shape)}"
                )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Normalise ``(rows, channels, ...)`` by the mean and variance of all ranks' rows."""
        lane = current_lane()
        uses_batch = self.training or self.running_mean is None
        if self._met[0] and uses_batch and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "SyncBatchNorm ran again in a backward, inside a checkpoint: its ranks meet in the forward alone. "
                "Leave the layer out of the checkpoint"
            )
        self._met[0] = lane is not None and uses_batch and _is_checkpointed()
        if lane is None or not uses_batch:
            return super().forward(input)
        self._check_input_dim(input)
        value = input, self.weight, self.bias, torch.is_grad_enabled()
        output, mean, variance, rows = lane.meet(
            ("batch norm", self.number), value, lambda values: of_all_ranks(lane.run, self.eps, values)
        )
        self._follow(mean, variance, rows)
        result: torch.Tensor = output
        return result

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, rows: int) -> None:
        """Move this rank's running statistics; their variance is unbiased, as in torch."""
        if not self.training or not self.track_running_stats:
            return
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the plain average of all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = variance * (rows / max(1, rows - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


@outside_the_compiler
def _is_checkpointed() -> bool:
    """Return whether this forward may be inside a checkpoint: without gradients, or with saved-tensor hooks."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
