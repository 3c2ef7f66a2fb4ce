"""Gradients of parameters in shards: each device keeps the sums of its parts.

Who completes a bucket adds it up and scatters the sum, in the order of ranks.  A rank that is ahead waits for the
others, so that its gradients do not pile up; the calls of a window are summed each, and added::

    rank 0   g3 g2 [takes; waits] ───────────────── g1 g0 [takes; adds up, scatters]
    rank 1   g3 ── g2 [takes; adds up, scatters] ── g1 ─ g0 [takes; waits] ─────────
    parts    device 0: a half of g3 g2, of g1 g0;  device 1: the other halves
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_core.step.grad_buckets import Columns, Communication
from mgpu_core.step.ranks import Ranks
from mgpu_core.step.reducer import Gradients, OwnGradients, Reducer

__all__ = ["CutGradients", "gradients_of"]


class CutGradients(Reducer):
    """The gradients of ranks whose parameters are in shards.

    Args:
        ranks: of the step.
        communication: how buckets are summed.
    """

    _collective, _fewest = "reduce_scatter", 0

    def __init__(self, ranks: Ranks, communication: Communication) -> None:
        assert ranks.shards is not None
        self._ranks, self._shards = ranks, ranks.shards
        super().__init__(ranks.replicas, communication, ranks.shards)

    def begin(self, ranks: int, *, overlap: bool, goes_on: bool) -> None:
        self.clear()  # also of a backward of the user's own between two calls of a window
        super().begin(ranks, overlap=True, goes_on=goes_on)
        if self._ranks.in_turns:
            self._ranks_on = [1]

    def _complete(self, rank: int, bucket: int) -> None:
        super()._complete(rank, bucket)
        if bucket in self._added:
            self._shards.pace.wait(rank, lambda: bucket not in self._added)
        else:
            self._shards.pace.went_on()

    def _add_ranks(self, bucket: int, index: int, columns: Columns, *, goes_on: bool = False) -> None:
        for gradients in columns.values():
            for i, gradient in zip(self.buckets.members[bucket], gradients, strict=True):
                if gradient is not None and gradient.layout is not torch.strided:
                    raise TypeError(
                        f"the gradient of {self._replicas.names[i]} is sparse, and the kernels update whole buffers: "
                        "build the layer with sparse=False"
                    )
        super()._add_ranks(bucket, index, columns, goes_on=goes_on)

    def set_aside(self) -> None:
        """Add the gradients of a call to the parts, before the next one of the window."""
        self.sum_the_rest()

    def show(self, used: Sequence[bool]) -> None:
        self.clear()  # no device has a whole one


def gradients_of(ranks: Ranks, communication: Communication) -> Gradients:
    """Return the gradients of a step's ranks; those of one rank alone stay where they are, unless they are recorded."""
    options = communication.options
    if ranks.shards is not None:
        return CutGradients(ranks, communication)
    if len(options.team) == 1 and communication.processes is None and not options.capture:
        return OwnGradients(ranks.replicas)
    return Reducer(ranks.replicas, communication)
