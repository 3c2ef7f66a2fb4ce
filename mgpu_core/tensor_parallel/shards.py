"""The base of the layers that are cut over ranks: parameters in parts, each on the device of its rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mgpu_core.comm import autograd, dispatch
from mgpu_core.devices.devices import DeviceLike
from mgpu_core.parallel.scatter_inputs import row_counts
from mgpu_core.ranks.team import Team
from mgpu_core.trees.module_tree import check_initialised
from mgpu_core.trees.moves import refuse_moves

__all__ = ["Sharded", "of_other_ranks"]


def of_other_ranks(tokens: torch.Tensor, counts: Sequence[int], rank: int) -> torch.Tensor:
    """Return which tokens are in the parts of a vocabulary that other ranks have.

    Tokens outside the vocabulary belong to the first and the last rank, where torch refuses them.
    """
    begin, end = sum(counts[:rank]), sum(counts[: rank + 1])
    elsewhere = torch.zeros_like(tokens, dtype=torch.bool)
    if rank > 0:
        elsewhere |= tokens < begin
    if rank < len(counts) - 1:
        elsewhere |= tokens >= end
    return elsewhere


class Sharded(nn.Module):
    """A layer whose weight is cut along one dimension.

    Attributes:
        device_ids: one device per rank.
        counts: size of each rank's part; the first ranks may have one more than the others.
        weights: one Parameter per rank, on its device.
    """

    weights: nn.ParameterList

    def _build(
        self, whole: nn.Module, kind: type[nn.Module], dim: int, device_ids: Sequence[DeviceLike], cut: str
    ) -> None:
        """Initialise the module, and cut the weight of ``whole`` along ``dim``, whose size errors call ``cut``."""
        if not isinstance(whole, kind):
            raise TypeError(f"the module to cut must be an nn.{kind.__name__}, not {type(whole).__name__}")
        weight: Any = whole.weight
        check_initialised([weight])
        super().__init__()
        self._team, self._dim = Team.of(device_ids), dim
        count, ranks = weight.shape[dim], len(self._team)
        if count < ranks:
            raise ValueError(f"{cut} must be at least the number of ranks: {count} for {ranks} ranks")
        self.device_ids, self.counts = list(self._team.devices), row_counts(count, ranks, None)
        self.weights = self._cut(weight)

    def _cut(self, whole: nn.Parameter) -> nn.ParameterList:
        parts = dispatch.scatter(whole.detach(), self._team.devices, self.counts, self._dim)
        return nn.ParameterList([nn.Parameter(part, whole.requires_grad) for part in parts])

    def _joined(self, shards: nn.ParameterList) -> nn.Parameter:
        """Return the whole parameter, in fresh memory on the first device."""
        whole = dispatch.gather([shard.detach() for shard in shards], self._dim, self.device_ids[0])
        return nn.Parameter(whole, shards[0].requires_grad)

    def _summed(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the ranks' outputs on the first device; differentiable."""
        return autograd.reduce_tensors([[output] for output in outputs], self.device_ids[0])[0]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Change dtypes; raise RuntimeError, before anything changes, if a shard would leave its device."""
        if any(fn(torch.empty(0, device=device)).device != device for device in self.device_ids):
            refuse_moves()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _devices_text(self) -> str:
        return f"device_ids=[{', '.join(map(str, self.device_ids))}]"
