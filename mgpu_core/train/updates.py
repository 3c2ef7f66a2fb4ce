"""The optimizer of a step on all devices: ours over the step's flat memory, torch's by its own step once per device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from mgpu_core.caller import warn_caller
from mgpu_core.optim import FlatOptimizer
from mgpu_core.optim.optimizer import LEFT_OVER
from mgpu_core.train.flat_update import FlatUpdate
from mgpu_core.train.reducer import Gradients, GradientSync
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.torch_update import TorchUpdate

__all__ = ["Updates", "check_optimizer"]

_grad_of = attrgetter("grad")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class _Update(Protocol):
    device_count: int  # of the devices that it updates: the first ones

    def prepare(self, used: Sequence[bool]) -> None: ...

    def launch(self, factor: float | torch.Tensor) -> None: ...

    def close(self) -> None: ...


def check_optimizer(optimizer: Any, named: dict[str, torch.nn.Parameter]) -> None:
    """Raise unless it is an optimizer over parameters of the module."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS calls the loss several times in a step, through a closure: TrainStep computes it once")
    known = {id(parameter) for parameter in named.values()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"parameter {index} of the optimizer's group {number}, of shape {tuple(parameter.shape)}, is not "
                    "one of net.parameters(): make the optimizer from the module that TrainStep gets"
                )


class _LeftOverStep:
    """The hook that looks for a step by hand after a TrainStep's own; known by its class."""

    def __init__(self, updates: Updates) -> None:
        self._updates = weakref.ref(updates)

    def __call__(self, *_: Any) -> None:
        updates = self._updates()
        if updates is not None:
            updates.check_left_over()


class Updates:
    """Run the user's optimizer on all devices.

    Devices of several kinds may differ in the last bit: then the first one is updated, and the others get its values.

    Args:
        optimizer: over parameters of the user's module; its settings are read at each update.
        replicas, gradients: the ranks' parameters, and their gradients.
        in_shards: each device updates a part of each bucket, and keeps that part's state alone.

    Attributes:
        is_flat: the optimizer is one of ours, which multiplies gradients by a factor itself.
        spent: the gradients of the last update, until those of the next one are made.

    Raises:
        ValueError: shards that the optimizer, or the devices, cannot have.
    """

    def __init__(self, optimizer: Optimizer, replicas: Replicas, gradients: Gradients, in_shards: bool) -> None:
        self.optimizer = optimizer
        self.is_flat = isinstance(optimizer, FlatOptimizer)
        self._in_shards, self._replicas, self._gradients = in_shards, replicas, gradients
        self._update: _Update | None = None
        self._shape: Any = None  # what decides how it is updated
        self._before: list[int] = []  # how often each parameter was written before the update
        self.spent: list[torch.Tensor | None] = []
        self._left_over: RemovableHandle | None = None
        if isinstance(optimizer, FlatOptimizer):
            optimizer.watch_spent(self.spent)
        elif hasattr(optimizer, _HOOKS[0]):  # a wrapper may lack what torch's class makes
            self._left_over = optimizer.register_step_pre_hook(_LeftOverStep(self))
        self._has_copies, self._is_laid_out = len(replicas.devices) > 1, isinstance(gradients, GradientSync)
        self.remember_values()
        if in_shards:
            self._check_shards()

    def _check_shards(self) -> None:
        if not self.is_flat:
            raise ValueError(
                f"shard_optimizer is for the optimizers of mgpu_core.optim (SGD, Adam, AdamW, Lion), not for "
                f"{type(self.optimizer).__module__.removesuffix('._functional')}.{type(self.optimizer).__name__}"
            )
        if self._replicas.is_mixed:
            raise ValueError("shard_optimizer wants devices of one kind: those of several round differently")

    @property
    def memory(self) -> tuple[int, int] | None:
        """Equal for as long as ours work in the same memory; ``None``: a recording cannot hold this update."""
        update = self._update
        if not isinstance(update, FlatUpdate) or not update.is_attached() or not self._is_plain():
            return None
        return id(update.flat), update.flat.generation

    @property
    def flat(self) -> FlatUpdate:
        """The update of ours over the step's memory, once it is prepared."""
        assert isinstance(self._update, FlatUpdate)
        return self._update

    def prepare(self, used: Sequence[bool]) -> _Update:
        """Do the host's part before an update of these parameters."""
        self._before = self._replicas.versions
        update = self._update
        if update is None or self._has_copies or self._is_laid_out:
            shape = [list(map(id, group["params"])) for group in self.optimizer.param_groups]
            if not self.is_flat:
                shape.append([self._is_plain()])
            if update is None or shape != self._shape or (isinstance(update, FlatUpdate) and not update.is_attached()):
                update = self._made()
                self._shape = shape
            update.prepare(used)
        return update

    def _made(self) -> _Update:
        self.close()
        if isinstance(self.optimizer, FlatOptimizer) and isinstance(self._gradients, GradientSync):
            self._update = FlatUpdate(self.optimizer, self._replicas, self._gradients.layout, self._in_shards)
        else:
            self._update = TorchUpdate(self.optimizer, self._replicas, self._gradients, self._is_plain())
        return self._update

    def launch(self, used: Sequence[bool], factor: float | torch.Tensor) -> None:
        """Update these parameters, by one call of ``optimizer.step()``; ours multiply the gradients by ``factor``."""
        update = self.prepare(used)
        if not self._has_copies:
            update.launch(factor)
            return
        written = self.values_changed()  # by a forward: what rank 0 has, is everybody's, as in the drop-in
        update.launch(factor)
        if written or update.device_count < len(self._replicas.devices) or not self._is_plain():
            self._replicas.send_values()

    def has_written(self) -> bool:
        """Return whether an update that failed has changed parameters all the same."""
        return self._update is not None and self._before != self._replicas.versions

    def conclude(self) -> None:
        """Do the host's part after an update."""
        self.spent[:] = map(_grad_of, self._replicas.own)
        if self._has_copies:
            self.remember_values()

    def remember_values(self) -> None:
        """Take the values as they are now for what all devices have."""
        self._versions = self._replicas.versions

    def places(self) -> set[int]:
        """Return which parameters the optimizer has."""
        members = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
        return {i for i, each in enumerate(self._replicas.own) if id(each) in members}

    def values_changed(self) -> list[int]:
        """Return the parameters that were written in place since; torch counts that, but not through ``.data``.

        Nobody has copies of them where there is one device, whose ranks share the values.
        """
        now = self._replicas.versions if self._has_copies else self._versions
        if now == self._versions:
            return []
        return [i for i, (one, other) in enumerate(zip(now, self._versions, strict=True)) if one != other]

    def close(self) -> None:
        """Leave the optimizer with state of its own."""
        if self._update is not None:
            self._update.close()
            self._update = None

    def leave(self) -> None:
        """Leave the optimizer alone."""
        self.close()
        self.spent.clear()
        if self._left_over is not None:
            self._left_over.remove()

    def check_left_over(self) -> None:
        """Warn where the optimizer is about to step by the gradients that this step has made and used."""
        for parameter, spent in zip(self._replicas.own, self.spent, strict=False):
            if spent is not None and parameter.grad is spent:
                warn_caller(LEFT_OVER)
                return

    def _is_plain(self) -> bool:
        """Return whether a step calls no code of the user's; a wrapper may lack what torch's class makes."""
        optimizer = self.optimizer
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return False
        hooks = [hook for name in _HOOKS for hook in getattr(optimizer, name, {}).values()]
        if any(type(hook) is not _LeftOverStep for hook in hooks):
            return False
        step = vars(optimizer).get("step")
        if getattr(step, "_wrapped_by_lr_sched", False):
            step = getattr(step, "__wrapped__", None)
        return step is None or getattr(step, "__func__", step) is type(optimizer).step
