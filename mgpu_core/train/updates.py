"""The update: what becomes of summed gradients.  Fused where the kernels know the optimizer, else torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mgpu_core import optim
from mgpu_core.caller import warn_caller
from mgpu_core.device.memory import note_written
from mgpu_core.optim.flat_buffers import compact
from mgpu_core.train.fused import FusedUpdate
from mgpu_core.train.fused_device import NO_GROUP
from mgpu_core.train.optimizer_facts import groups_of, has_own_step, step_hooks, why_not_fused
from mgpu_core.train.reducer import GradientSync
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.sharded import ShardedUpdate
from mgpu_core.train.torch_update import TorchUpdate

__all__ = ["Updates", "check_optimizer"]


class _Update(Protocol):
    handles: dict[str, RemovableHandle]
    device_count: int  # of the devices that it updates: the first ones

    def is_settled(self) -> bool: ...

    def follow(self) -> None: ...

    def prepare(self, used: Sequence[bool]) -> None: ...

    def launch(self) -> None: ...

    def has_written(self) -> bool: ...

    def conclude(self) -> None: ...

    def close(self) -> None: ...


def check_optimizer(optimizer: Any, named: dict[str, torch.nn.Parameter]) -> None:
    """Raises unless it is an optimizer over parameters of the module."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS calls the loss several times in a step, through a closure: TrainStep computes it once")
    known = {id(parameter) for parameter in named.values()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"parameter {place} of the optimizer's group {number}, of shape {tuple(parameter.shape)}, is not "
                    "one of net.parameters(): make the optimizer from the module that TrainStep gets"
                )


class Updates:
    """The user's optimizer at work on all devices.

    Where devices are of several kinds, their arithmetic may differ in the last bit: then the first one is updated, and
    the others get its values.

    Args:
        optimizer: over parameters of the user's module; its learning rates are read at each update.
        replicas, sync: the ranks' modules, and the sums of their gradients.
        in_shards: each device updates a part of each bucket, and keeps that part's state alone.

    Raises:
        ValueError: shards that the optimizer, or the devices, cannot have.
    """

    def __init__(self, optimizer: Optimizer, replicas: Replicas, sync: GradientSync, in_shards: bool) -> None:
        self.optimizer = optimizer
        self._in_shards = in_shards
        self._replicas, self._sync = replicas, sync
        self._update: _Update | None = None
        self._shape: Any = None
        self._warned = False
        self._has_shown_state = False  # in memory of the step's
        self.handles: dict[str, RemovableHandle] = {}  # what it has hooked to the optimizer
        self.remember_values()
        if in_shards:
            self._refuse_shards(why_not_fused(optimizer, replicas.own, ()))

    @property
    def memory(self) -> tuple[int, int] | None:
        """Equal for as long as the fused kernels work in the same memory; ``None``: it is not they who update."""
        if not isinstance(self._update, FusedUpdate):
            return None
        return id(self._update), self._update.generation

    def prepare(self, used: Sequence[bool]) -> None:
        """What the host does before an update of these parameters."""
        update = self._update
        if update is None or not update.is_settled():
            update = self._update_now()
            update.follow()
        update.prepare(used)

    def launch(self) -> None:
        """What the devices do for it."""
        assert self._update is not None  # it was prepared
        written = self.values_changed()  # by a forward: what rank 0 has, is everybody's, as in the drop-in
        self._update.launch()
        if written or self._update.device_count < len(self._replicas.devices):
            self._replicas.send_values()

    @property
    def fused(self) -> FusedUpdate:
        """Who updates, where :attr:`memory` says that the fused kernels do."""
        assert isinstance(self._update, FusedUpdate)
        return self._update

    def has_written(self) -> bool:
        """Whether an update that failed has changed parameters all the same: torch's own step, before a hook of it."""
        return self._update is not None and self._update.has_written()

    def conclude(self, used: Sequence[bool]) -> None:
        """What the host does after it."""
        assert self._update is not None
        self._update.conclude()
        # Graphs of the user's own over these parameters are out of date; those of the ranks are gone.
        note_written([own for own, is_used in zip(self._replicas.own, used, strict=True) if is_used])
        self.remember_values()

    def remember_values(self) -> None:
        """What the values are now is what all devices have."""
        self._versions = self._versions_now()

    def places(self) -> set[int]:
        """Which parameters the optimizer has."""
        groups = groups_of(self.optimizer, self._replicas.own)
        return {i for i, group in enumerate(groups) if group != NO_GROUP}

    def _versions_now(self) -> list[int]:
        """Nothing where there is one device, whose ranks share the values."""
        return self._replicas.versions if len(self._replicas.devices) > 1 else []

    def values_changed(self) -> list[int]:
        """Which parameters the user has written in place since; torch counts that, but not through ``.data``."""
        now = self._versions_now()
        if now == self._versions:
            return []
        return [i for i, (one, other) in enumerate(zip(now, self._versions, strict=True)) if one != other]

    def close(self) -> None:
        """Leaves the optimizer as a torch optimizer with state of its own."""
        if self._update is not None:
            self._update.close()
            self._update = None
        for state in self.optimizer.state.values() if self._has_shown_state else ():
            for name, value in state.items() if isinstance(state, dict) else ():
                if torch.is_tensor(value):
                    state[name] = compact(value)

    def _update_now(self) -> _Update:
        shape = _shape_of(self.optimizer)
        if self._update is None or shape != self._shape:
            check_optimizer(self.optimizer, dict(zip(self._replicas.names, self._replicas.own, strict=True)))
            if self._update is not None:
                self._update.close()
            self._shape = shape
            self._update = self._made()
            self.handles |= self._update.handles
        return self._update

    def _made(self) -> _Update:
        reason = why_not_fused(self.optimizer, self._replicas.own, self._sync.layout.loose)
        self._has_shown_state |= reason is None
        if self._in_shards:
            self._refuse_shards(reason)
            return ShardedUpdate(self.optimizer, self._replicas.own, self._sync.layout.buckets, self._sync.layout.flats)
        if reason is None:
            flats = self._sync.layout.flats[:1] if self._replicas.is_mixed else self._sync.layout.flats
            return FusedUpdate(self.optimizer, self._replicas.own, self._sync.layout.buckets, flats)
        if reason and type(self.optimizer).__module__ == optim.__name__:
            raise ValueError(
                f"mgpu_core.optim.{type(self.optimizer).__name__} is for the fused kernels, and they do not serve this "
                f"one ({reason}): use torch.optim's"
            )
        if reason and not self._warned:
            self._warned = True
            warn_caller(
                f"the fused kernels do not serve this {type(self.optimizer).__name__} ({reason}): torch's step does"
            )
        return TorchUpdate(self.optimizer, self._replicas, self._sync)

    def _refuse_shards(self, reason: str | None) -> None:
        if self._replicas.is_mixed:
            raise ValueError("shard_optimizer wants devices of one kind: those of several round differently")
        if reason is not None:
            raise ValueError(
                f"shard_optimizer is for the fused kernels, which do not serve this {type(self.optimizer).__name__} "
                f"({reason or 'they know SGD, Adam and AdamW'})"
            )


def _shape_of(optimizer: Optimizer) -> Any:
    """What decides who updates, and which parameter belongs to which group."""
    switches = ("differentiable", "amsgrad", "decoupled_weight_decay")
    groups = [
        (*(bool(group.get(each)) for each in switches), *map(id, group["params"])) for group in optimizer.param_groups
    ]
    return step_hooks(optimizer), has_own_step(optimizer), groups
