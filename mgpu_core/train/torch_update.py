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
from torch.utils.hooks import RemovableHandle

from mgpu_core.nothing import NOTHING
from mgpu_core.train.optimizer_facts import has_own_step, step_hooks
from mgpu_core.train.reducer import GradientSync
from mgpu_core.train.replicas import Replicas

__all__ = ["TorchUpdate"]


class TorchUpdate:
    """The user's optimizer on the first device, and a twin of it on each other one.

    Attributes:
        device_count: how many devices it updates: all, or the first one alone.
    """

    def __init__(self, optimizer: Optimizer, replicas: Replicas, sync: GradientSync) -> None:
        self._optimizer, self._replicas, self._sync = optimizer, replicas, sync
        is_torchs = type(optimizer).__module__.partition(".")[0] == "torch"
        is_alone = replicas.is_mixed or not is_torchs or any(step_hooks(optimizer)) or has_own_step(optimizer)
        self.device_count = 1 if is_alone else len(replicas.devices)
        self._versions: list[int] = []
        self._twins: list[Optimizer] = []
        self._left: list[tuple[Any, int]] = []  # the state as the last update has left it, and how often it was written
        twins = self._twins
        self.handles: dict[str, RemovableHandle] = {}
        if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):  # a wrapper may lack what torch's class makes
            self.handles["load"] = optimizer.register_load_state_dict_post_hook(lambda _: twins.clear())

    def close(self) -> None:
        for handle in self.handles.values():
            handle.remove()

    def is_settled(self) -> bool:
        """A class may do what it likes, wherever it likes."""
        return False

    def follow(self) -> None:
        """The optimizer itself is at work: all that it has become counts."""

    def prepare(self, used: Sequence[bool]) -> None:
        if not self._is_as_left():
            self._twins.clear()  # they know nothing of a step, or an edit, of the user's own
        self._left = []  # or what a step replaces would stay beside what takes its place
        if not self._twins:
            self._twins += [self._twin(device) for device in range(1, self.device_count)]
        for device, twin in enumerate(self._twins, start=1):
            for mine, theirs in zip(twin.param_groups, self._optimizer.param_groups, strict=True):
                mine.update({name: value for name, value in theirs.items() if name != "params"})
            self._give_gradients(device, used)
        self._versions = self._replicas.versions

    def launch(self) -> None:
        self._optimizer.step()
        for device, twin in enumerate(self._twins, start=1):
            with _own_default(self._replicas.devices[device]):
                twin.step()
        self._replicas.settle()  # from a class or a hook that assigns `p.data`

    def has_written(self) -> bool:
        """Whether a launch that failed has changed parameters before."""
        return self._versions != self._replicas.versions

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
        states = [each for each in self._optimizer.state.values() if isinstance(each, dict)]  # or the user's own
        values = [value for state in states for value in state.values()]
        return [(each, each._version if torch.is_tensor(each) else 0) for each in values]

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
        views = self._sync.layout.flats[device].gradient_views
        row = self._replicas.parameters[self._replicas.ranks_of[device][0]]
        for i, parameter in enumerate(row):
            if not used[i]:
                parameter.grad = None
            elif i in views:
                parameter.grad = views[i]
            else:
                parameter.grad = self._sync.layout.sums.sparse[i].to(parameter.device)


def _own_default(device: torch.device) -> AbstractContextManager[object]:
    """A default device that was set for the first device would get the state of all others, too."""
    return NOTHING if torch.get_default_device().type == "cpu" else torch.device(device)
