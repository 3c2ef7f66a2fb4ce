"""Data parallelism over pipelines: copies of a pipeline on other devices, each with a part of the rows.

copy 0   stage 0 on a ── stage 1 on b        the user's own; the optimizer updates its parameters
copy 1   stage 0 on c ── stage 1 on d        takes the values of copy 0 before a call, where they have changed
         sum over a, c   sum over b, d       of gradients, per stage, into copy 0's

"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mgpu_core.comm import dispatch
from mgpu_core.devices.tensor_checks import memory_of
from mgpu_core.pipeline.module import Pipeline
from mgpu_core.trace.tracer import span

__all__ = ["PipelineCopies"]


class PipelineCopies:
    """A pipeline and its copies.

    Args:
        pipelines: the user's own first.

    Attributes:
        all: the same.
    """

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        self.all = pipelines
        self._versions: list[int] = []
        self._sources: Any = None  # the memory of the parameters

    def follow(self) -> None:
        """Give the copies the values, the buffers and the modes of the pipeline as it is now."""
        own, *others = self.all
        if not others:
            return
        parameters = list(own.parameters())
        versions = [parameter._version for parameter in parameters]
        sources = memory_of(parameters)
        is_changed = (versions, sources) != (self._versions, self._sources)
        self._versions, self._sources = versions, sources
        with torch.no_grad(), span("replicate"):
            for rows in _by_stage([pipeline.buffers() for pipeline in self.all]):
                dispatch.broadcast_into([row[0] for row in rows], [row[1:] for row in rows])
            for rows in _by_stage([pipeline.parameters() for pipeline in self.all]) if is_changed else ():
                dispatch.broadcast_into([row[0] for row in rows], [row[1:] for row in rows])
        for other in others:
            for mine, theirs in zip(own.module.modules(), other.module.modules(), strict=True):
                theirs.training = mine.training
            for parameter, copied in zip(parameters, other.parameters(), strict=True):
                copied.requires_grad_(parameter.requires_grad)

    def add_gradients(self) -> None:
        """Add the gradients of the copies to those of the pipeline, and drop them."""
        if len(self.all) == 1:
            return
        with torch.no_grad(), span("reduce"):
            for rows in _by_stage([pipeline.parameters() for pipeline in self.all]):
                used = [row for row in rows if any(each.grad is not None for each in row)]
                if not used:
                    continue
                totals = dispatch.reduce_batch([[each.grad for each in row] for row in used], "sum", used[0][0].device)
                for row, total in zip(used, totals, strict=True):
                    row[0].grad = total
                    for each in row[1:]:
                        each.grad = None


def _by_stage(columns: Sequence[Iterator[torch.Tensor]]) -> list[list[tuple[torch.Tensor, ...]]]:
    """Return the tensors of all pipelines side by side, grouped by their devices."""
    groups: dict[tuple[torch.device, ...], list[tuple[torch.Tensor, ...]]] = {}
    for row in zip(*columns, strict=True):
        groups.setdefault(tuple(each.device for each in row), []).append(row)
    return list(groups.values())
