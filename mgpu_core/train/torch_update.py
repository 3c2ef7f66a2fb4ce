"""The update by an optimizer's own step.

Once per device, where it is one of ``torch.optim``, which computes the same on all of them.  What a class or a hook of
the user's own does besides (random numbers, counts, weights that it clamps) must happen once: then the first device is
updated, and the others get its values.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from mgpu_core.nothing import NOTHING
from mgpu_core.optim import FlatOptimizer
from mgpu_core.train.reducer import Gradients, GradientSync
from mgpu_core.train.replicas import Replicas

__all__ = ["TorchUpdate"]


class TorchUpdate:
    """The user's optimizer on the first device, and a twin of it on each other one.

    Attributes:
        device_count: how many devices it updates: all, or the first one alone.
    """

    def __init__(self, optimizer: Optimizer, replicas: Replicas, gradients: Gradients, is_plain: bool) -> None:
        self._optimizer, self._replicas, self._gradients = optimizer, replicas, gradients
        is_torchs = type(optimizer).__module__.partition(".")[0] == "torch"
        self._flat = optimizer if isinstance(optimizer, FlatOptimizer) else None
        self._may_assign = not (is_torchs or self._flat) or not is_plain  # to `p.data`
        self.device_count = 1 if self._may_assign or replicas.is_mixed else len(replicas.devices)
        self._twins: list[Optimizer] = []
        self._kept: list[Any] = []
        self._left: list[tuple[int, int]] = []  # the state as the last update has left it, and how often it was written

    def close(self) -> None:
        """Leave the optimizer as it is: the state is its own."""

    def prepare(self, used: Sequence[bool]) -> None:
        """Give the clones the settings and gradients of this update."""
        if self.device_count == 1:
            return
        if self._state_now() != self._left:
            self._twins.clear()  # they know nothing of a step, an edit or a loaded state of the user's own
        self._left, self._kept = [], []  # or what a step replaces would stay beside what takes its place
        if not self._twins:
            self._twins += [self._twin(device) for device in range(1, self.device_count)]
        for device, twin in enumerate(self._twins, start=1):
            for mine, theirs in zip(twin.param_groups, self._optimizer.param_groups, strict=True):
                mine.update({name: value for name, value in theirs.items() if name != "params"})
            self._give_gradients(device, used)

    def launch(self, factor: float | torch.Tensor) -> None:
        """Call the step of the optimizer and of its clones; one of ours multiplies the gradients by ``factor``."""
        if self._flat is not None:
            self._flat.step_by(None, factor)
        else:
            self._optimizer.step()
        for device, twin in enumerate(self._twins, start=1):
            with _own_default(self._replicas.devices[device]):
                twin.step()
        if self._may_assign:
            self._replicas.settle()
        if self._twins:
            self._left = self._state_now()

    def _state_now(self) -> list[tuple[int, int]]:
        if not self._twins:
            return []
        states = [each for each in self._optimizer.state.values() if isinstance(each, dict)]  # or the user's own
        values = [value for state in states for value in state.values()]
        self._kept = values  # so that no other object gets the address of one
        return [(id(each), each._version if torch.is_tensor(each) else 0) for each in values]

    def _twin(self, device: int) -> Optimizer:
        """The optimizer over the parameters of another device's first rank, with the same state."""
        theirs = self._replicas.parameters[self._replicas.ranks_of[device][0]]
        memo: dict[int, Any] = {id(own): twin for own, twin in zip(self._replicas.own, theirs, strict=True)}
        twin = copy.deepcopy(self._optimizer, memo)
        for name, value in vars(self._optimizer).items():  # what a class of the user's own keeps besides
            if name not in ("step", *vars(twin)):
                setattr(twin, name, value)
        # Which would make all of a state the parameter's dtype and device, also what torch keeps in others, on the CPU.
        twin.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))
        for own, parameter in zip(self._replicas.own, theirs, strict=True):
            for kind, value in self._optimizer.state.get(own, {}).items():
                if torch.is_tensor(value):
                    place = value.device if value.device.type == "cpu" else parameter.device
                    twin.state[parameter][kind] = value.detach().to(place, copy=True)
        return twin

    def _give_gradients(self, device: int, used: Sequence[bool]) -> None:
        assert isinstance(self._gradients, GradientSync)  # of several devices
        layout = self._gradients.layout
        views = layout.flats[device].gradient_views
        row = self._replicas.parameters[self._replicas.ranks_of[device][0]]
        for i, parameter in enumerate(row):
            if not used[i]:
                parameter.grad = None
            elif i in views:
                parameter.grad = views[i]
            else:
                parameter.grad = layout.sums.sparse[i].to(parameter.device)


def _own_default(device: torch.device) -> AbstractContextManager[object]:
    """A default device that was set for the first device would get the state of all others, too."""
    return NOTHING if torch.get_default_device().type == "cpu" else torch.device(device)
