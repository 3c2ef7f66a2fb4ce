"""The update: what becomes of summed gradients.  Fused where the kernels know the optimizer, else torch's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mgpu_core import optim
from mgpu_core.device.memory import note_written
from mgpu_core.engine.flat import compact
from mgpu_core.engine.fused import FusedUpdate, step_hooks, why_not_fused
from mgpu_core.engine.gradients import GradientSync
from mgpu_core.engine.replicas import Replicas
from mgpu_core.engine.sharded import ShardedUpdate
from mgpu_core.nothing import NOTHING

__all__ = ["Updates", "check_optimizer"]


class _Update(Protocol):
    handles: dict[str, RemovableHandle]

    def prepare(self, used: Sequence[bool]) -> None: ...

    def launch(self) -> None: ...

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
        self._update_now().prepare(used)

    def launch(self) -> None:
        """What the devices do for it."""
        assert self._update is not None  # it was prepared
        self._update.launch()
        if self._replicas.is_mixed:
            self._replicas.send_values()

    def launch_on(self, place: int) -> None:
        """What one device does for a fused update, where devices share nothing."""
        assert isinstance(self._update, FusedUpdate)
        self._update.launch_on(place)

    def hold_back(self, place: int, if_not_zero: torch.Tensor) -> None:
        """Lets a fused update of device ``place``, launched next, change nothing where this number is not 0.

        Nobody waits for it; it lies on that device.
        """
        assert isinstance(self._update, FusedUpdate)
        self._update.hold_back(place, if_not_zero)

    def was_held_back(self) -> bool:
        """Whether it has changed nothing; waits for the device."""
        assert isinstance(self._update, FusedUpdate)
        return self._update.was_held_back()

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

    def _versions_now(self) -> list[int]:
        """Nothing where there is one device, whose ranks share the values."""
        return [each._version for each in self._replicas.own] if len(self._replicas.devices) > 1 else []

    def values_changed(self) -> bool:
        """Whether the user has written parameters in place since; torch counts that, but not through ``.data``."""
        return self._versions != self._versions_now()

    def close(self) -> None:
        """Leaves the optimizer as a torch optimizer with state of its own."""
        if self._update is not None:
            self._update.close()
            self._update = None
        for state in self.optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if torch.is_tensor(value):
                    state[name] = compact(value)

    def _update_now(self) -> _Update:
        shape = _shape_of(self.optimizer)
        if self._update is None or shape != self._shape:
            if self._update is not None:
                check_optimizer(self.optimizer, dict(zip(self._replicas.names, self._replicas.own, strict=True)))
                self._update.close()
            self._shape = shape
            self._update = self._made()
            self.handles |= self._update.handles
        return self._update

    def _made(self) -> _Update:
        reason = why_not_fused(self.optimizer, self._replicas.own, self._sync.loose)
        if self._in_shards:
            self._refuse_shards(reason)
            return ShardedUpdate(self.optimizer, self._replicas.own, self._sync.buckets, self._sync.flats)
        if reason is None:
            flats = self._sync.flats[:1] if self._replicas.is_mixed else self._sync.flats
            return FusedUpdate(self.optimizer, self._replicas.own, self._sync.buckets, flats)
        if reason and type(self.optimizer).__module__ == optim.__name__:
            raise ValueError(
                f"mgpu_core.optim.{type(self.optimizer).__name__} is for the fused kernels, and they do not serve this "
                f"one ({reason}): use torch.optim's"
            )
        if reason and not self._warned:
            self._warned = True
            warnings.warn(
                f"the fused kernels do not serve this {type(self.optimizer).__name__} ({reason}): torch's step does",
                stacklevel=6,
            )
        return _TorchUpdate(self.optimizer, self._replicas, self._sync)

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
    groups = [(bool(group.get("differentiable")), *map(id, group["params"])) for group in optimizer.param_groups]
    return step_hooks(optimizer), groups


class _TorchUpdate:
    """The optimizer's own step, once per device: the user's on the first, a twin on each other."""

    def __init__(self, optimizer: Optimizer, replicas: Replicas, sync: GradientSync) -> None:
        self._optimizer, self._replicas, self._sync = optimizer, replicas, sync
        self._twins: list[Optimizer] = []
        self._left: list[tuple[Any, int]] = []  # the state as the last update has left it, and how often it was written
        twins = self._twins
        self.handles = {"load": optimizer.register_load_state_dict_post_hook(lambda _: twins.clear())}

    def close(self) -> None:
        for handle in self.handles.values():
            handle.remove()

    def prepare(self, used: Sequence[bool]) -> None:
        if not self._is_as_left():
            self._twins.clear()  # they know nothing of a step, or an edit, of the user's own
        self._left = []  # or what a step replaces would stay beside what takes its place
        if not self._twins and not self._replicas.is_mixed:
            self._twins += [self._twin(device) for device in range(1, len(self._replicas.devices))]
        for device, twin in enumerate(self._twins, start=1):
            for mine, theirs in zip(twin.param_groups, self._optimizer.param_groups, strict=True):
                mine.update({name: value for name, value in theirs.items() if name != "params"})
            self._give_gradients(device, used)

    def launch(self) -> None:
        for device, twin in enumerate(self._twins, start=1):
            with _own_default(self._replicas.devices[device]):
                twin.step()
        self._optimizer.step()

    def conclude(self) -> None:
        """The optimizers have counted themselves."""
        self._left = self._state_now()

    def _is_as_left(self) -> bool:
        now = self._state_now()
        same = len(now) == len(self._left)
        return same and all(a is b and n == m for (a, n), (b, m) in zip(now, self._left, strict=True))

    def _state_now(self) -> list[tuple[Any, int]]:
        if not self._twins:
            return []
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        return [(each, each._version if torch.is_tensor(each) else 0) for each in values]

    def _twin(self, device: int) -> Optimizer:
        """The optimizer over the parameters of another device's first rank, with the same state."""
        theirs = self._replicas.parameters[self._replicas.ranks_of[device][0]]
        memo: dict[int, Any] = {id(own): twin for own, twin in zip(self._replicas.own, theirs, strict=True)}
        twin = copy.deepcopy(self._optimizer, memo)
        for name, value in vars(self._optimizer).items():  # what a class of the user's own keeps besides
            if name not in ("step", *vars(twin)):
                setattr(twin, name, value)
        twin.load_state_dict(self._optimizer.state_dict())  # which brings the state to the parameters' device
        for parameter, state in twin.state.items():
            for kind, value in state.items():  # but not a count of steps, which torch keeps on the default device
                if torch.is_tensor(value) and value.device.type != "cpu":
                    state[kind] = value.to(parameter.device)
        return twin

    def _give_gradients(self, device: int, used: Sequence[bool]) -> None:
        views = self._sync.flats[device].gradient_views
        row = self._replicas.parameters[self._replicas.ranks_of[device][0]]
        for i, parameter in enumerate(row):
            if not used[i]:
                parameter.grad = None
            elif i in views:
                parameter.grad = views[i]
            else:
                parameter.grad = self._sync.sums.sparse[i].to(parameter.device)


def _own_default(device: torch.device) -> AbstractContextManager[object]:
    """A default device that was set for the first device would get the state of all others, too."""
    return NOTHING if torch.get_default_device().type == "cpu" else torch.device(device)
