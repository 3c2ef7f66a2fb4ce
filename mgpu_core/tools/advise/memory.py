"""The memory of one rank in training, in bytes: counted on the tensors, and on CUDA measured as well."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from mgpu_core.pipeline.balance import SavedTensors
from mgpu_core.tools.advise.batches import Batch
from mgpu_core.tools.advise.plan import AdvicePlan
from mgpu_core.tools.advise.strategies import Loop

__all__ = ["Memory", "count_memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one rank with its share of the sample's rows, bytes.  Ranks of one device share parameters and state.

    Attributes:
        parameters_nbytes: with the buffers.
        gradients_nbytes: of the parameters that got one.
        optimizer_nbytes: the optimizer's state after a step.
        activations_nbytes: saved by autograd between forward and backward, the rank's rows included.
        peaks: peak memory of torch on each device during a step of all ranks, above the level before, as
            ``(device, nbytes)``; empty where that is not measured.
    """

    parameters_nbytes: int
    gradients_nbytes: int
    optimizer_nbytes: int
    activations_nbytes: int
    peaks: tuple[tuple[str, int], ...] = ()

    @property
    def total_nbytes(self) -> int:
        """All that was counted."""
        return self.parameters_nbytes + self.gradients_nbytes + self.optimizer_nbytes + self.activations_nbytes


def count_memory(plan: AdvicePlan, part: Batch) -> Memory:
    """Count over one step of a copy of the net, on a rank's share of the batch; ``peaks`` is empty."""
    with closing(Loop(plan, lambda net: net)) as way:
        model_tensors = [*way.net.parameters(), *way.net.buffers()]
        saved = SavedTensors(model_tensors)
        with saved:
            loss = way.loss(part)
        loss.backward()
        way.optimizer.step()
        gradients = [each.grad for each in way.net.parameters() if each.grad is not None]
        state = [each for each in tree_leaves(list(way.optimizer.state.values())) if isinstance(each, torch.Tensor)]
        return Memory(_nbytes(model_tensors), _nbytes(gradients), _nbytes(state), saved.nbytes)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors)
