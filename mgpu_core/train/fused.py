"""SGD, Adam and AdamW over the flat buckets: one kernel per bucket and device.

The optimizer is the user's object, and stays in charge: learning rates are read from its groups before each update,
and its state is the flat state, shown as views.  What this file adds is a table that says which parameter lies where,
belongs to which group, has made how many steps, and takes part this time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mgpu_core.look import Look
from mgpu_core.optim.bucket_layout import Bucket
from mgpu_core.optim.flat_buffers import FlatTensors
from mgpu_core.train.fused_device import NO_GROUP, FusedOnDevice
from mgpu_core.train.optimizer_facts import (
    group_table,
    groups_of,
    has_plain_settings,
    is_sgd,
    optimizer_look,
    settings_of,
)
from mgpu_core.train.shown_state import ShownState

__all__ = ["FusedUpdate"]


class FusedUpdate:
    """The update of all devices.

    Args:
        optimizer: over some or all of ``parameters``.
        parameters: of the user's module.
        buckets: where they lie.
        flats: per device the flat values and gradients.

    Attributes:
        device_count: how many devices it updates.
        generation: grows when tables or state get other memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        flats: Sequence[FlatTensors],
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._placed = {each.parameter for bucket in buckets for each in bucket.segments}
        self._groups_of = self._groups_now()
        self._is_sgd = is_sgd(optimizer)
        self._used: list[bool] = []
        self._settings: list[Any] = []
        self._look: Look | None = None  # at the optimizer, as the last update has left it
        self._counts: list[torch.Tensor] = []  # what torch counts in, of those that take part
        self._flats = flats
        self.device_count = len(flats)
        self.generation = 0
        self._devices = self._made_devices(buckets)
        self._shown = self._made_shown()
        me = weakref.ref(self)
        self.handles = {"load": optimizer.register_load_state_dict_post_hook(lambda _: _adopt(me))}
        self.adopt_state()

    def _made_devices(self, buckets: Sequence[Bucket]) -> list[FusedOnDevice]:
        groups = len(self._optimizer.param_groups)
        return [
            FusedOnDevice(self._is_sgd, buckets, flat.values, flat.gradients, self._groups_of, groups)
            for flat in self._flats
        ]

    def _made_shown(self) -> ShownState:
        return ShownState(self._optimizer, self._parameters, self._flats[0], self._devices)

    def _groups_now(self) -> list[int]:
        groups = groups_of(self._optimizer, self._parameters)
        return [group if i in self._placed else NO_GROUP for i, group in enumerate(groups)]

    def close(self) -> None:
        """Leaves the optimizer alone."""
        for handle in self.handles.values():
            handle.remove()

    def is_settled(self) -> bool:
        """Whether there is nothing to :meth:`follow`: the optimizer is what the last update has left."""
        return self._look is not None and not self._look.is_over() and not self._shown.is_written()

    def follow(self) -> None:
        """Takes over what has become of the optimizer, and makes room for the state that it is going to have."""
        self._look = None
        if not self._shown.is_as_left():
            self.adopt_state()
        self._read_groups()
        self._allocate()

    def prepare(self, used: Sequence[bool]) -> None:
        """Marks the parameters that take part in one update; the others are left alone whole."""
        if used != self._used:
            self._look = None
            self._used = list(used)
            for device in self._devices:
                device.activate(self._used)

    def launch(self) -> None:
        """The kernels: all that a device does for an update."""
        for place in range(len(self._devices)):
            self._run(place)

    def launch_on(self, place: int) -> None:
        """Those of one device, for a recording."""
        self._run(place)
        self._shown.watch()  # also where nothing is concluded: the recording may fail later

    def _run(self, place: int) -> None:
        decoupled = bool(self._optimizer.param_groups[0].get("decoupled_weight_decay"))
        self._devices[place].run(decoupled=decoupled)

    def has_written(self) -> bool:
        """Nothing that counts, where it has failed: behind the kernels come counts alone."""
        return False

    def hold_back(self, place: int, if_not_zero: torch.Tensor) -> None:
        """Lets the next launch on a device change nothing where this number on it is not 0; nobody waits for it."""
        self._devices[place].held_back.copy_(if_not_zero)

    def was_held_back(self) -> bool:
        """Whether the last launch has changed nothing; waits for the device, and lets later ones go on."""
        held = bool(self._devices[0].held_back)
        if held:
            for device in self._devices:
                device.held_back.zero_()
        return held

    def conclude(self) -> None:
        """What the optimizer shows, and what torch counts, after an update."""
        if self._look is None:
            self._show_state()
            self._counts = self._shown.steps_of(self._taking_part())
        if self._counts:
            torch._foreach_add_(self._counts, 1)
        if self._look is not None:
            self._shown.watch_again()
        else:
            self._shown.watch()
            self._look = optimizer_look(self._optimizer) if has_plain_settings(self._optimizer) else None
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether there was a step

    def _read_groups(self) -> None:
        """Fills the tables of hyper-parameters where the user, or a scheduler, has changed one."""
        settings = settings_of(self._optimizer)
        if settings == self._settings:
            return
        if self._is_sgd and [each[1] for each in settings] != [each[1] for each in self._settings]:
            self._restart_momentum()
        self._settings = settings
        table = group_table(self._optimizer)
        for device in self._devices:
            device.groups.copy_(table, non_blocking=True)  # the table is read before the call returns

    def _restart_momentum(self) -> None:
        """What has no momentum buffer yet begins with a copy of its gradient, whenever its group gets momentum."""
        steps = [int(i in self._shown.places) for i in range(len(self._parameters))]
        for device in self._devices:
            device.set_steps(steps)

    def _allocate(self) -> None:
        """State that the first step, or a changed group, makes necessary."""
        kinds = self._kinds()
        if self._is_sgd and not any(group["momentum"] for group in self._optimizer.param_groups):
            kinds = []
        self._allocate_on_devices(kinds)

    def _allocate_on_devices(self, kinds: Sequence[str]) -> None:
        self.generation += any(kind not in self._devices[0].states for kind in kinds)
        for device in self._devices:
            device.allocate(kinds)
        self._shown.find_views()

    def _kinds(self) -> list[str]:
        """The state that the optimizer may have."""
        if self._is_sgd:
            return ["momentum_buffer"]
        amsgrad = self._optimizer.param_groups[0]["amsgrad"]
        return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]

    def _show_state(self) -> None:
        """Gives the optimizer the state of parameters that were updated for the first time."""
        groups = self._optimizer.param_groups
        for i, takes_part in enumerate(self._taking_part()):
            if not takes_part or i in self._shown.places:
                continue
            if self._is_sgd and not groups[self._groups_of[i]]["momentum"]:
                continue
            self._shown.show(i, groups[self._groups_of[i]])

    def _taking_part(self) -> list[bool]:
        """What has a gradient, and has not left the optimizer's groups."""
        return [used and group != NO_GROUP for used, group in zip(self._used, self._groups_of, strict=True)]

    def loaded(self) -> None:
        """A state was loaded into the optimizer."""
        self.adopt_state()

    def adopt_state(self) -> None:
        """Takes over the state that the optimizer has: a loaded one, or that of its steps before."""
        self._shown.forget()
        self._groups_of = self._groups_now()
        self.generation += 1
        for device in self._devices:
            device.forget()
        steps = [0] * len(self._parameters)
        kinds = self._kinds()
        present = self._shown.found(self._placed, kinds)
        self._allocate_on_devices([kind for kind in kinds if any(kind in state for state in present.values())])
        for i, state in present.items():
            for device in self._devices:
                device.fill(i, state, self._parameters[i])
            steps[i] = 1 if self._is_sgd else int(state["step"])
            self._shown.show(i, self._optimizer.param_groups[self._groups_of[i]])
        for device in self._devices:
            device.set_steps(steps)
        self._used = []  # a table of steps was written; that of who takes part is, too
        self._shown.remember_others()
        self._shown.watch()


def _adopt(update: weakref.ref[FusedUpdate]) -> None:
    found = update()
    if found is not None:
        found.loaded()
