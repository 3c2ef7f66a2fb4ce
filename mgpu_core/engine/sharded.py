"""The fused update with its state in shards: each device keeps, and updates, its part of every bucket.

Optimizer states of the ZeRO kind (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, stage 1): gradients are reduce-scattered, each device updates its shard, and values are all-gathered.
The optimizer has its whole state while somebody looks: in its ``state_dict()``, and before a step of the user's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from mgpu_core.comm import collectives
from mgpu_core.engine.flat import FlatTensors, part_of, shaped
from mgpu_core.engine.fused import FusedUpdate
from mgpu_core.engine.fused_device import FusedOnDevice
from mgpu_core.engine.layout import Bucket, shard_of
from mgpu_core.engine.optimizer_facts import OwnHook

__all__ = ["ShardedUpdate"]


class ShardedUpdate(FusedUpdate):
    """The update of all devices, each of its own shard.

    Args:
        optimizer: over some or all of ``parameters``.
        parameters: of the user's module.
        buckets: laid out for as many shards as there are devices.
        flats: per device the flat values and gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        flats: Sequence[FlatTensors],
    ) -> None:
        # What the optimizer holds of each parameter between two looks, and the tensors that are lent to it in one:
        # whatever else is found there, somebody else has put there.
        self._stripped: dict[int, dict[str, Any]] = {}
        self._lent: dict[int, dict[str, torch.Tensor]] = {}
        super().__init__(optimizer, parameters, buckets, flats)
        me = weakref.ref(self)
        self.handles["whole"] = optimizer.register_state_dict_pre_hook(lambda _: _gather(me))
        self.handles["parts"] = optimizer.register_state_dict_post_hook(lambda *_: _strip(me))
        self.handles["own step"] = optimizer.register_step_pre_hook(OwnHook(partial(_leave, me)))

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

    def launch(self) -> None:
        """The kernels of each device's shard, and the values to all devices."""
        super().launch()
        shards = len(self._flats)
        for wholes in zip(*(flat.values for flat in self._flats), strict=True):
            collectives.all_gather_into([part_of(each, place, shards) for place, each in enumerate(wholes)], wholes)

    def follow(self) -> None:
        """Takes back what was lent, and follows."""
        self.strip()
        super().follow()

    def close(self) -> None:
        """Leaves the optimizer with its whole state."""
        self.gather()
        super().close()

    def loaded(self) -> None:
        """Another state was loaded: what lies in the shards is worth nothing."""
        self._stripped.clear()
        self._shown.clear()
        super().loaded()

    def adopt_state(self) -> None:
        """Cuts the state that the optimizer has; from then on it shows none of it but counts of steps."""
        self.gather()  # where the user has set one parameter's state, the others' must not get lost
        super().adopt_state()
        # All that it shows lies in the shards now, whoever has put it there.
        self._lent = {i: dict.fromkeys(self._devices[0].states, torch.empty(0)) for i in self._shown}
        self.strip()

    def _find_views(self) -> None:
        """There is no tensor that could be shown."""

    def _is_as_left(self, i: int, state: dict[str, Any]) -> bool:
        lent = self._lent.get(i, {})
        if state is not self._stripped.get(i):
            return False  # somebody has reset it
        return all(kind == "step" or (kind in lent and value is lent[kind]) for kind, value in state.items())

    def _point(self, i: int) -> None:
        super()._point(i)
        self._stripped[i] = self._optimizer.state[self._parameters[i]]

    def gather(self) -> None:
        """Lends the optimizer the whole state, for as long as it is looked at; what the user has reset, stays so."""
        for i in self._shown:
            state = self._left(i)
            if state is not None:
                self._lend(i, state)

    def _left(self, i: int) -> dict[str, Any] | None:
        """What the optimizer holds of a parameter, if that is what was left there; ``None``: somebody has reset it."""
        found: dict[str, Any] | None = self._optimizer.state.get(self._parameters[i])
        return found if found is self._stripped.get(i) else None

    @torch.no_grad()
    def _lend(self, i: int, state: dict[str, Any]) -> None:
        parameter = self._parameters[i]
        for kind in self._devices[0].states:
            if kind in state:
                continue
            flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            for device in self._devices:
                device.bring(i, kind, flat)
            state[kind] = self._lent.setdefault(i, {})[kind] = shaped(flat, 0, parameter)

    def forget_shards(self) -> None:
        """From now on what the optimizer shows counts."""
        self._lent.clear()

    def strip(self) -> None:
        """Takes back what was lent."""
        for i, lent in self._lent.items():
            state = self._left(i)
            if state is not None:  # another dict, because a state_dict() holds the one that there was
                left = {kind: value for kind, value in state.items() if kind not in lent}
                self._optimizer.state[self._parameters[i]] = self._stripped[i] = left
        self._lent.clear()


def _gather(update: weakref.ref[ShardedUpdate]) -> None:
    found = update()
    if found is not None:
        found.gather()


def _leave(update: weakref.ref[ShardedUpdate]) -> None:
    """Before a step of the user's own: what the optimizer shows afterwards is not what lies in the shards."""
    _gather(update)
    found = update()
    if found is not None:
        found.forget_shards()


def _strip(update: weakref.ref[ShardedUpdate]) -> None:
    found = update()
    if found is not None:
        found.strip()
