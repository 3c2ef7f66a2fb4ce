"""What the user's optimizer shows of the flat state, and whether it is still what an update has left there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from mgpu_core.look import Look
from mgpu_core.optim.flat_buffers import FlatTensors
from mgpu_core.train.fused_device import FusedOnDevice
from mgpu_core.train.optimizer_facts import is_sgd

__all__ = ["ShownState"]


class ShownState:
    """The entries of ``optimizer.state``: views of the first device's flat state, and torch's counts of steps.

    Args:
        optimizer: over some or all of ``parameters``.
        parameters: of the user's module, by place.
        flat: the first device's buckets.
        devices: who has the flat state.

    Attributes:
        places: of the parameters whose state it shows.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        flat: FlatTensors,
        devices: Sequence[FusedOnDevice],
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._flat, self._devices = flat, devices
        self._counts_steps = not is_sgd(optimizer)
        self._others = 0  # states of parameters outside the buckets, which are frozen
        self._steps: list[torch.Tensor | None] = []  # what torch counts in, of each parameter whose state is shown
        self._versions = Look()  # of what the optimizer shows
        self.forget()

    def forget(self) -> None:
        """Nothing is shown; what lies in the optimizer is its own."""
        self.places: set[int] = set()
        self._views: dict[str, dict[int, torch.Tensor]] = {}  # by kind of state and parameter

    def found(self, places: Iterable[int], kinds: Sequence[str]) -> dict[int, dict[str, Any]]:
        """Of these parameters, the states that the optimizer has; entries that say nothing are taken out of it.

        Args:
            places: of the parameters.
            kinds: of state that it may have; what else is found, is the user's own.
        """
        present = {}
        for i in sorted(places):
            state = self._optimizer.state.get(self._parameters[i], {})
            if any(torch.is_tensor(state.get(kind)) for kind in kinds):
                present[i] = state
            elif all(each is None for each in state.values()):
                self._optimizer.state.pop(self._parameters[i], None)  # torch's SGD notes that there is no momentum
        return present

    def find_views(self) -> None:
        """Of kinds of state that the devices have got since."""
        for kind, flats in self._devices[0].states.items():
            if kind not in self._views:
                self._views[kind] = self._flat.views_of(flats)

    def show(self, i: int, group: dict[str, Any]) -> None:
        """Gives the optimizer the state of a parameter, which is in this group."""
        self.places.add(i)
        self._others -= self._parameters[i] in self._optimizer.state
        state = self._optimizer.state[self._parameters[i]]
        for kind, views in self._views.items():
            state[kind] = views[i]
        if self._counts_steps:
            on_device = group.get("fused") or group.get("capturable")  # where torch's own step would want it
            device = self._parameters[i].device if on_device else torch.device("cpu")
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=device))

    def remember_others(self) -> None:
        """What the optimizer has now besides what is shown, is what the next updates must find."""
        self._others = len(self._optimizer.state) - len(self.places)

    def watch(self) -> None:
        """Where somebody writes to what the optimizer shows from now on, the other devices would not know of it."""
        self._steps = self._steps_now()
        shown = [flat for flats in self._devices[0].states.values() for flat in flats]
        self._versions = Look((), [(each, "_version") for each in [*shown, *self._steps] if each is not None])

    def watch_again(self) -> None:
        """The same tensors, where none has been put in another's place."""
        self._versions.take_again()

    def is_written(self) -> bool:
        """Whether somebody has."""
        return self._versions.is_over()

    def is_as_left(self) -> bool:
        """Whether the optimizer's state is what the last update has left: no step and no edit of the user's own."""
        state = self._optimizer.state
        if len(state) != len(self.places) + self._others or self.is_written():
            return False
        steps = self._steps_now()
        if len(steps) != len(self._steps) or not all(map(is_, steps, self._steps)):
            return False
        for i in self.places:  # noqa: SIM110  # in each step: a loop costs half of what `all` does
            if not self._has_left(i, state[self._parameters[i]]):
                return False
        return True

    def _has_left(self, i: int, state: dict[str, Any]) -> bool:
        for kind, views in self._views.items():  # noqa: SIM110
            if state.get(kind) is not views[i]:
                return False
        return True

    def _steps_now(self) -> list[torch.Tensor | None]:
        """Torch counts steps in tensors, but for SGD."""
        if not self._counts_steps:
            return []
        state = self._optimizer.state
        return [state.get(self._parameters[i], {}).get("step") for i in self.places]

    def steps_of(self, taking_part: Sequence[bool]) -> list[torch.Tensor]:
        """What torch counts an optimizer's steps in, of those that took part; the kernels count in their table."""
        if not self._counts_steps:
            return []
        return [self._optimizer.state[self._parameters[i]]["step"] for i in self.places if taking_part[i]]
