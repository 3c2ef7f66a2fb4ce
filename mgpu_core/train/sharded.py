"""The fused update with its state in shards: each device keeps, and updates, its part of every bucket.

Optimizer states of the ZeRO kind (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, stage 1): gradients are reduce-scattered, each device updates its shard, and values are all-gathered.
The optimizer has its whole state while somebody looks: in its ``state_dict()``, and before a step of the user's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch.optim import Optimizer

from mgpu_core.comm import dispatch as collectives
from mgpu_core.optim.bucket_layout import Bucket, shard_of
from mgpu_core.optim.flat_buffers import FlatTensors, part_of
from mgpu_core.train.fused import FusedUpdate
from mgpu_core.train.fused_device import FusedOnDevice
from mgpu_core.train.lent_state import LentState
from mgpu_core.train.optimizer_facts import OwnHook

__all__ = ["ShardedUpdate"]


class ShardedUpdate(FusedUpdate):
    """The update of all devices, each of its own shard.

    Args:
        optimizer: over some or all of ``parameters``.
        parameters: of the user's module.
        buckets: laid out for as many shards as there are devices.
        flats: per device the flat values and gradients.
    """

    _shown: LentState

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        flats: Sequence[FlatTensors],
    ) -> None:
        super().__init__(optimizer, parameters, buckets, flats)
        shown = weakref.ref(self._shown)
        self.handles["whole"] = optimizer.register_state_dict_pre_hook(lambda _: _lend(shown))
        self.handles["parts"] = optimizer.register_state_dict_post_hook(lambda *_: _take_back(shown))
        self.handles["own step"] = optimizer.register_step_pre_hook(OwnHook(partial(_give_away, shown)))

    def _made_devices(self, buckets: Sequence[Bucket]) -> list[FusedOnDevice]:
        shards = len(self._flats)
        return [
            FusedOnDevice(
                self._is_sgd,
                [shard_of(bucket, place, shards) for bucket in buckets],
                [part_of(values, place, shards) for values in flat.values],
                [part_of(gradients, place, shards) for gradients in flat.gradients],
                self._groups_of,
                len(self._optimizer.param_groups),
            )
            for place, flat in enumerate(self._flats)
        ]

    def _made_shown(self) -> LentState:
        return LentState(self._optimizer, self._parameters, self._flats[0], self._devices)

    def launch(self) -> None:
        """The kernels of each device's shard, and the values to all devices."""
        super().launch()
        shards = len(self._flats)
        for wholes in zip(*(flat.values for flat in self._flats), strict=True):
            collectives.all_gather_into([part_of(each, place, shards) for place, each in enumerate(wholes)], wholes)

    def follow(self) -> None:
        """Takes back what was lent, and follows."""
        self._shown.take_back()
        super().follow()

    def close(self) -> None:
        """Leaves the optimizer with its whole state."""
        self._shown.lend()
        super().close()

    def loaded(self) -> None:
        """Another state was loaded."""
        self._shown.forget()
        super().loaded()

    def adopt_state(self) -> None:
        """Cuts the state that the optimizer has; from then on it shows none of it but counts of steps."""
        self._shown.lend()  # where the user has set one parameter's state, the others' must not get lost
        super().adopt_state()
        self._shown.take_all()


def _lend(state: weakref.ref[LentState]) -> None:
    found = state()
    if found is not None:
        found.lend()


def _give_away(state: weakref.ref[LentState]) -> None:
    """Before a step of the user's own: what the optimizer shows afterwards is not what lies in the shards."""
    found = state()
    if found is not None:
        found.lend()
        found.give_away()


def _take_back(state: weakref.ref[LentState]) -> None:
    found = state()
    if found is not None:
        found.take_back()
