"""Batch normalisation in a pipeline: running statistics of a whole batch, updated once.

Each micro-batch is normalised by its own statistics, as torch does.  The running statistics of a layer are updated at
the end of the call, from all rows that it saw: means and variances of the micro-batches are combined as in Chan, Golub
and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["DeferredStatistics", "recomputing"]

_thread = threading.local()


class DeferredStatistics:
    """The statistics of one batch-normalisation layer over the micro-batches of a call.

    Args:
        layer: hooks on it collect the statistics, and keep torch from updating the running ones.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        self._layer = layer
        self.drop()
        layer.register_forward_pre_hook(self.begin)
        layer.register_forward_hook(self.end, always_call=True)

    def drop(self) -> None:
        """Forget the micro-batches so far."""
        self._count = 0
        self._mean: torch.Tensor | None = None
        self._squares: torch.Tensor | None = None

    def begin(self, layer: Any, args: tuple[Any, ...]) -> None:
        """Keep torch from updating the running statistics in a forward."""
        if not layer.training or layer.running_mean is None or not layer.track_running_stats:
            return
        layer.track_running_stats = False
        if not getattr(_thread, "is_recomputing", False) and _current_graph_task_id() == -1:
            self._add(args[0].detach())

    def end(self, layer: Any, args: Any, output: Any) -> None:
        """Let torch update them again."""
        if layer.running_mean is not None:
            layer.track_running_stats = True

    @torch.no_grad()
    def _add(self, rows: torch.Tensor) -> None:
        dims = [dim for dim in range(rows.ndim) if dim != 1]
        variance, mean = torch.var_mean(rows, dims, correction=0)
        count = rows.numel() // rows.shape[1]
        squares = variance * count
        if self._mean is not None and self._squares is not None:
            total, shift = self._count + count, mean - self._mean
            squares = self._squares + squares + shift * shift * (self._count * count / total)
            mean, count = self._mean + shift * (count / total), total
        self._mean, self._squares, self._count = mean, squares, count

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics of the layer once, from all rows since the last time."""
        layer: Any = self._layer
        if self._mean is None or self._squares is None:
            return
        layer.num_batches_tracked.add_(1)
        momentum = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(self._mean.to(layer.running_mean.dtype), momentum)
        unbiased = self._squares / max(1, self._count - 1)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)
        self.drop()


@contextmanager
def recomputing(modules: Sequence[Module]) -> Iterator[None]:
    """Run a forward of these modules a second time without a further update of their buffers.

    Forwards that run without the modules' hooks save the same tensors as the first time.
    """
    hooks = [(each, getattr(hook, "__self__", None)) for each in modules for hook in each._forward_pre_hooks.values()]
    deferred = [(module, owner) for module, owner in hooks if isinstance(owner, DeferredStatistics)]
    tables = [module._buffers for each in modules for module in each.modules() if module._buffers]
    before = [dict(table) for table in tables]
    _thread.is_recomputing = True
    try:
        for table in tables:
            table.update({name: None if each is None else each.clone() for name, each in table.items()})
        for module, statistics in deferred:
            statistics.begin(module, ())
        yield
    finally:
        for module, statistics in deferred:
            statistics.end(module, (), None)
        _thread.is_recomputing = False
        for table, values in zip(tables, before, strict=True):
            table.update(values)
