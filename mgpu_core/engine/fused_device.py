"""The fused update of one device: its tables, its flat state, and a kernel per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core import kernels
from mgpu_core.engine.flat import FlatTensors
from mgpu_core.engine.layout import Bucket
from mgpu_core.kernels.flat_tables import ACTIVE, STEP

__all__ = ["NO_GROUP", "FusedOnDevice"]

NO_GROUP = -1  # of a parameter that the optimizer does not have


class FusedOnDevice:
    """Tables, state and kernels of one device."""

    def __init__(self, is_sgd: bool, buckets: Sequence[Bucket], flat: FlatTensors, groups_of: Sequence[int]) -> None:
        self._is_sgd, self._buckets, self._flat, self._groups_of = is_sgd, buckets, flat, groups_of
        count = max(groups_of) + 1
        self.groups = torch.zeros(count, 6, dtype=torch.float64, device=flat.device)
        self.segments = [
            kernels.segment_table(
                [each.count for each in bucket.segments],
                groups=[max(0, groups_of[each.parameter]) for each in bucket.segments],
                begins=[each.begin for each in bucket.segments],
                device=flat.device,
            )
            for bucket in buckets
        ]
        self.states: dict[str, list[torch.Tensor]] = {}
        self.views: dict[str, dict[int, torch.Tensor]] = {}
        self._kernels: list[kernels.FlatSgd | kernels.FlatAdam] = []

    def forget(self) -> None:
        """Drops the state."""
        self.states.clear()
        self.views.clear()
        self._kernels.clear()

    def allocate(self, kinds: Sequence[str]) -> None:
        """Zeros for each kind of state that is not there yet."""
        for kind in kinds:
            if kind not in self.states:
                self.states[kind] = [torch.zeros_like(each) for each in self._flat.values]
                self.views[kind] = self._flat.views_of(self.states[kind])
                self._kernels.clear()

    def fill(self, i: int, state: dict[str, Any]) -> None:
        """Copies a parameter's state, as torch keeps it, into the flat one."""
        for kind, views in self.views.items():
            if kind in state and torch.is_tensor(state[kind]) and i in views:
                views[i].copy_(state[kind])

    def activate(self, used: Sequence[bool]) -> None:
        """Marks the segments that take part in the next update."""
        self._set(ACTIVE, [int(is_used and self._groups_of[i] != NO_GROUP) for i, is_used in enumerate(used)])

    def set_steps(self, steps: Sequence[int]) -> None:
        """How many updates each parameter has had."""
        self._set(STEP, steps)

    def _set(self, column: int, numbers: Sequence[int]) -> None:
        for table, bucket in zip(self.segments, self._buckets, strict=True):
            table[:, column].copy_(torch.tensor([numbers[each.parameter] for each in bucket.segments]))

    def run(self, *, decoupled: bool) -> None:
        """One kernel per bucket."""
        if not self._kernels:
            self._kernels = [self._kernel(b, decoupled) for b in range(len(self._buckets))]
        for each in self._kernels:
            each.step()

    def _kernel(self, b: int, decoupled: bool) -> kernels.FlatSgd | kernels.FlatAdam:
        values, gradients = self._flat.values[b], self._flat.gradients[b]
        state = {kind: tensors[b] for kind, tensors in self.states.items()}
        tables = self.segments[b], self.groups
        if self._is_sgd:
            return kernels.FlatSgd(values, gradients, state.get("momentum_buffer"), *tables)
        largest = state.get("max_exp_avg_sq")
        moments = state["exp_avg"], state["exp_avg_sq"]
        return kernels.FlatAdam(values, gradients, *moments, *tables, decoupled=decoupled, max_exp_avg_sq=largest)
