"""The fused update of one device: its tables, its flat state, and a kernel per bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mgpu_core import kernels
from mgpu_core.kernels.flat_tables import ACTIVE, STEP
from mgpu_core.optim.bucket_layout import Bucket, Segment
from mgpu_core.optim.flat_buffers import in_memory_order

__all__ = ["NO_GROUP", "FusedOnDevice"]

NO_GROUP = -1  # of a parameter that the optimizer does not have


class FusedOnDevice:
    """Tables, state and kernels of one device.

    Args:
        is_sgd: else Adam or AdamW.
        buckets: what this device updates, all of each bucket or a shard.
        values, gradients: per bucket, flat.
        groups_of: per parameter the number of its group.
        groups: how many the optimizer has.

    Attributes:
        held_back: where this number is not 0, the kernels change nothing.
    """

    def __init__(
        self,
        is_sgd: bool,
        buckets: Sequence[Bucket],
        values: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        groups_of: Sequence[int],
        groups: int,
    ) -> None:
        self._is_sgd, self._buckets, self._groups_of = is_sgd, buckets, groups_of
        self._values, self._gradients = values, gradients
        self._places: dict[int, list[tuple[int, Segment]]] = {}
        for b, bucket in enumerate(buckets):
            for each in bucket.segments:
                self._places.setdefault(each.parameter, []).append((b, each))
        device = values[0].device if values else torch.device("cpu")
        self.groups = torch.zeros(groups, 6, dtype=torch.float64, device=device)
        self.segments = [
            kernels.segment_table(
                [each.count for each in bucket.segments],
                groups=[max(0, groups_of[each.parameter]) for each in bucket.segments],
                begins=[each.begin for each in bucket.segments],
                device=device,
            )
            for bucket in buckets
        ]
        self.held_back = torch.zeros((), dtype=torch.float32, device=device)
        self.states: dict[str, list[torch.Tensor]] = {}
        self._kernels: list[kernels.FlatSgd | kernels.FlatAdam] = []

    def forget(self) -> None:
        """Drops the state."""
        self.states.clear()
        self._kernels.clear()

    def allocate(self, kinds: Sequence[str]) -> None:
        """Zeros for each kind of state that is not there yet."""
        for kind in kinds:
            if kind not in self.states:
                self.states[kind] = [torch.zeros_like(each) for each in self._values]
                self._kernels.clear()

    def fill(self, i: int, state: dict[str, Any], like: torch.Tensor) -> None:
        """Copies a parameter's state, as torch keeps it, into the flat one; ``like`` is the parameter."""
        for kind, flats in self.states.items():
            if torch.is_tensor(state.get(kind)):
                values = in_memory_order(state[kind], like)
                for piece, each in self._pieces(i, flats):
                    piece.copy_(values[each.offset : each.offset + each.count])

    def bring(self, i: int, kind: str, whole: torch.Tensor) -> None:
        """Copies this device's part of a parameter's flat state into its place in the whole, in the order of memory."""
        for piece, each in self._pieces(i, self.states[kind]):
            whole[each.offset : each.offset + each.count].copy_(piece)

    def _pieces(self, i: int, flats: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Segment]]:
        for b, each in self._places.get(i, ()):
            yield flats[b][each.begin : each.begin + each.count], each

    def activate(self, used: Sequence[bool]) -> None:
        """Marks the segments that take part in the next update."""
        self._set(ACTIVE, [int(is_used and self._groups_of[i] != NO_GROUP) for i, is_used in enumerate(used)])

    def set_steps(self, steps: Sequence[int]) -> None:
        """How many updates each parameter has had."""
        self._set(STEP, steps)

    def _set(self, column: int, numbers: Sequence[int]) -> None:
        for table, bucket in zip(self.segments, self._buckets, strict=True):
            found = [numbers[each.parameter] for each in bucket.segments]
            table[:, column].copy_(torch.tensor(found, dtype=table.dtype))

    def run(self, *, decoupled: bool) -> None:
        """One kernel per bucket."""
        if not self._kernels:
            some = [b for b, bucket in enumerate(self._buckets) if bucket.segments]  # a shard may be padding alone
            self._kernels = [self._kernel(b, decoupled) for b in some]
        for each in self._kernels:
            each.step()

    def _kernel(self, b: int, decoupled: bool) -> kernels.FlatSgd | kernels.FlatAdam:
        values, gradients = self._values[b], self._gradients[b]
        state = {kind: tensors[b] for kind, tensors in self.states.items()}
        tables = self.segments[b], self.groups
        if self._is_sgd:
            momentum = state.get("momentum_buffer")
            return kernels.FlatSgd(values, gradients, momentum, *tables, found_inf=self.held_back)
        largest = state.get("max_exp_avg_sq")
        moments = state["exp_avg"], state["exp_avg_sq"]
        return kernels.FlatAdam(
            values, gradients, *moments, *tables, decoupled=decoupled, max_exp_avg_sq=largest, found_inf=self.held_back
        )
