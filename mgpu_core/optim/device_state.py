"""The optimizer's memory on one device: tables, flat state, device scalars, and a kernel per bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from mgpu_core import kernels
from mgpu_core.devices.transfer import copy_into
from mgpu_core.kernels.flat_tables import ACTIVE, STEP
from mgpu_core.optim.bucket_layout import Bucket, Segment
from mgpu_core.optim.flat_buffers import in_memory_order, shaped

__all__ = ["NO_GROUP", "DeviceState", "Launch"]

Launch: TypeAlias = tuple[kernels.FlatKernel, list[int]]
NO_GROUP = -1  # of a parameter that the optimizer does not have


class DeviceState:
    """Tables, state and kernels of one device.

    Args:
        kinds: all kinds of state that the kernel takes, in its order.
        buckets: the parts that this device updates, all of each bucket or a shard.
        values, gradients: per bucket, flat; no gradients: launches are given where these are.
        group_of: per parameter the number of its group, or :data:`NO_GROUP`.
        groups: how many the optimizer has.

    Attributes:
        gradients: as given, or since.
        groups: the table of settings, float64 ``(groups, 6)``.
        segments: per bucket its table of segments.
        states: by kind, per bucket.
        clip: float64 scalar that the kernels multiply gradients by.
        held_back: float32 scalar; where it is not 0 a launch changes nothing.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        buckets: Sequence[Bucket],
        values: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        group_of: Mapping[int, int],
        groups: int,
    ) -> None:
        self._kinds, self._buckets, self._group_of = kinds, buckets, group_of
        self._values, self.gradients = values, gradients
        self._found: dict[int, list[tuple[int, int, Segment]]] = {}
        for b, bucket in enumerate(buckets):
            for row, segment in enumerate(bucket.segments):
                self._found.setdefault(segment.parameter, []).append((b, row, segment))
        device = values[0].device if values else torch.device("cpu")
        self.groups = torch.zeros(groups, 6, dtype=torch.float64, device=device)
        self.segments = [self._table(bucket, device) for bucket in buckets]
        self.held_back = torch.zeros((), dtype=torch.float32, device=device)
        self.clip = torch.ones((), dtype=torch.float64, device=device)
        self.states: dict[str, list[torch.Tensor]] = {}

    def _table(self, bucket: Bucket, device: torch.device) -> torch.Tensor:
        return kernels.segment_table(
            [each.count for each in bucket.segments],
            groups=[max(0, self._group_of[each.parameter]) for each in bucket.segments],
            begins=[each.begin for each in bucket.segments],
            device=device,
        )

    @property
    def parameters(self) -> set[int]:
        """The parameters of which this device updates something."""
        return set(self._found)

    def forget(self) -> None:
        """Drop the state."""
        self.states.clear()

    def allocate(self, kinds: Sequence[str]) -> None:
        """Make zeros of each kind of state that is not there yet."""
        for kind in kinds:
            if kind not in self.states:
                self.states[kind] = [torch.zeros_like(each) for each in self._values]

    def fill(self, i: int, state: Mapping[str, Any], like: torch.Tensor) -> None:
        """Copy a parameter's state, as torch keeps it, into the flat one; ``like`` is the parameter."""
        for kind, flats in self.states.items():
            if torch.is_tensor(state.get(kind)):
                values = in_memory_order(state[kind], like)
                for piece, segment in self._pieces(i, flats):
                    copy_into(piece, values[segment.offset : segment.offset + segment.count])

    def bring(self, i: int, kind: str, whole: torch.Tensor) -> None:
        """Copy this device's part of a parameter's state into ``whole``, flat, in the order of memory."""
        for piece, segment in self._pieces(i, self.states[kind]):
            copy_into(whole[segment.offset : segment.offset + segment.count], piece)

    def _pieces(self, i: int, flats: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Segment]]:
        for b, _, segment in self._found.get(i, ()):
            yield flats[b][segment.begin : segment.begin + segment.count], segment

    def view(self, i: int, kind: str, like: torch.Tensor) -> torch.Tensor:
        """Return a parameter's whole state of a kind as a view in the shape of ``like``."""
        ((b, _, segment),) = self._found[i]
        return shaped(self.states[kind][b], segment.begin, like)

    def step_view(self, i: int) -> torch.Tensor:
        """Return the parameter's count of updates: int64, 0-d, a view of the table."""
        b, row, _ = self._found[i][0]
        return self.segments[b][row, STEP]

    def activate(self, used: Sequence[bool]) -> None:
        """Mark the segments that take part in the next update."""
        self._set(ACTIVE, [int(is_used and self._group_of[i] != NO_GROUP) for i, is_used in enumerate(used)])

    def set_steps(self, steps: Sequence[int]) -> None:
        """Write how many updates each parameter has had."""
        self._set(STEP, steps)

    def _set(self, column: int, numbers: Sequence[int]) -> None:
        for table, bucket in zip(self.segments, self._buckets, strict=True):
            by_segment = [numbers[each.parameter] for each in bucket.segments]
            # The numbers are read before the call returns, and the host does not wait for the device.
            table[:, column].copy_(torch.tensor(by_segment, dtype=table.dtype, device="cpu"), non_blocking=True)

    def scale_by(self, factor: float | torch.Tensor) -> None:
        """Set the factor of gradients for the next launches."""
        if isinstance(factor, torch.Tensor):
            copy_into(self.clip, factor)
        else:
            self.clip.fill_(factor)

    def launches(self, name: str) -> list[Launch]:
        """Return a kernel of this name per bucket, with the parameters of its segments."""
        some = [bucket for bucket in enumerate(self._buckets) if self._is_ours(bucket[1])]
        return [(self._kernel(name, b), [each.parameter for each in bucket.segments]) for b, bucket in some]

    def _is_ours(self, bucket: Bucket) -> bool:
        """Return whether the optimizer has parameters of a bucket; a shard may be padding alone."""
        return any(self._group_of[each.parameter] != NO_GROUP for each in bucket.segments)

    def _kernel(self, name: str, b: int) -> kernels.FlatKernel:
        states = [self.states[kind][b] if kind in self.states else None for kind in self._kinds]
        return kernels.FlatKernel(
            name, self._values[b], self.gradients[b] if self.gradients else None, states, self.segments[b], self.groups,
            clip=self.clip, found_inf=self.held_back,
        )  # fmt: skip
