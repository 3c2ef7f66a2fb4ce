"""An optimizer's state over flat buffers on one or several devices, and one update of them all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from mgpu_core.comm import dispatch
from mgpu_core.devices.dtypes import FLOATING
from mgpu_core.devices.graphs import CudaRecorder, Recording
from mgpu_core.devices.transfer import copy_into
from mgpu_core.optim.bucket_layout import Bucket, shard_of
from mgpu_core.optim.device_state import NO_GROUP, DeviceState, Launch
from mgpu_core.optim.flat_buffers import FlatTensors, part_of, shaped
from mgpu_core.optim.rules import Rule, table_of

__all__ = ["FlatState", "State"]

State = defaultdict[torch.Tensor, Any]


class FlatState:
    """State, tables and kernels of all devices.

    Args:
        optimizer: its groups give the settings; its ``state`` is filled with views.
        rule: its row of the table.
        parameters: of which the buckets name some.
        buckets: per device; they name parameters by their index.
        flats: per device the flat values and gradients.
        copies: all devices have the same buckets: each updates all of them, or with ``shards`` its part of each.
        shards: how many parts there are; 1: none.
        holds_gradients: kernels read the flat gradients; otherwise each launch is given where they are.

    Attributes:
        devices: one per flat.
        is_cut: the devices keep parts, and no parameter shows its gradient.
        factor: of gradients in the next update; ``None``: the devices alone know.
        generation: grows when tables or state get other memory.
        launches: kernels of all devices; :meth:`prepare` makes them, and a new state empties them.
        recorded: launches for which :meth:`record` was called, and a graph of them per device.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: Rule,
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Sequence[Bucket]],
        flats: Sequence[FlatTensors],
        *,
        copies: bool,
        shards: int = 1,
        holds_gradients: bool = True,
    ) -> None:
        self._optimizer, self._rule, self._parameters = optimizer, rule, parameters
        self.flats, self.shards, self.is_cut = flats, shards, any(flat.is_cut for flat in flats)
        self._likes = {i: view for flat in reversed(flats) for i, view in flat.value_views.items()}
        self.group_of = self._groups_now()
        _check_dtypes([parameters[i] for i in self._likes if self.group_of[i] != NO_GROUP])
        groups = len(optimizer.param_groups)
        self.devices = [
            DeviceState(
                list(rule.states),
                [shard_of(bucket, index, shards) if shards > 1 else bucket for bucket in device_buckets],
                flat.parts_of_values(index, shards),
                flat.parts_of_gradients(index, shards) if holds_gradients else [],
                self.group_of,
                groups,
            )
            for index, (device_buckets, flat) in enumerate(zip(buckets, flats, strict=True))
        ]
        self._owners = self.devices[:1] if copies and shards == 1 else self.devices  # which hold each number once
        self._used: list[bool] = []
        self._settings: list[list[Any]] = []
        self._group_kinds: list[list[str]] = []  # per group the kinds of state that its settings ask for
        self._kernel = ""
        self.factor: float | None = 1.0
        self._is_factor_recorded = False  # a recorded graph writes it
        self.launches: list[Launch] = []
        self.recorded: tuple[list[Launch], list[Recording]] = [], []
        self._shown: list[Any] = []  # entries of the optimizer's state, and their values
        self._ids: list[int] = []  # of these, which are kept so that no other object gets an id
        self._entries: list[Any] = []  # the entries, by parameter, as this object has left them
        self._own: list[Any] = []  # their values that this object has made
        self._is_new = False
        self.generation = 0
        self.fill()

    def hold_gradients(self) -> None:
        """Let kernels read the flat gradients from now on."""
        if not all(device.gradients for device in self.devices):
            for device, flat in zip(self.devices, self.flats, strict=True):
                device.gradients = flat.gradients
            if self.launches:
                self.launches = [each for device in self.devices for each in device.launches(self._kernel)]

    def record(self, recorder: CudaRecorder) -> None:
        """Let the launches of each device be one, of a graph, until others are made."""
        if self.recorded[0] is not self.launches:
            pairs = zip(self.flats, self.devices, strict=True)
            graphs = [recorder.record(flat.device, partial(self._launch, device))[0] for flat, device in pairs]
            self.recorded = self.launches, graphs

    def _launch(self, device: DeviceState) -> list[torch.Tensor]:
        """Launch a device's update in a recording, by kernels whose own memory is the graph's; return no results."""
        for kernel, _ in device.launches(self._kernel):
            kernel.step()
        return []

    def _groups_now(self) -> dict[int, int]:
        groups = enumerate(self._optimizer.param_groups)
        numbers = {id(each): number for number, group in groups for each in group["params"]}
        return {i: numbers.get(id(each), NO_GROUP) for i, each in enumerate(self._parameters)}

    def fill(self) -> None:
        """Take over the state that the optimizer has, which is as torch keeps it; show views instead."""
        self.generation += 1
        self._kinds_of: dict[int, list[str]] = {}  # kinds of state, by parameter that has some
        self._used, self._settings, self._group_kinds, self.launches = [], [], [], []
        state, steps = self._optimizer.state, [0] * len(self._parameters)
        for device in self.devices:
            device.forget()
        for i in self._likes:
            entry = state.get(self._parameters[i]) or {}
            present = [kind for kind in self._rule.states if torch.is_tensor(entry.get(kind))]
            if present and self.group_of[i] != NO_GROUP:
                steps[i] = int(entry["step"]) if self._rule.counts_steps else 1
                self._kinds_of[i] = present
        kinds = self._rule.kinds(self._optimizer.param_groups) + [
            kind for present in self._kinds_of.values() for kind in present
        ]
        for device in self.devices:
            device.allocate(kinds)
            for i in self._kinds_of:
                device.fill(i, state[self._parameters[i]], self._parameters[i])
            device.set_steps(steps)
        for i in self._kinds_of:
            self._show(i)
        self._remember()

    def prepare(self, used: Sequence[bool]) -> None:
        """Bring settings and tables up to date for an update of the parameters that are ``used``.

        State that was taken away from the optimizer starts anew, and entries that were replaced count.
        """
        entries = list(self._optimizer.state.values())  # by no parameter: to hash one costs two calls
        if list(map(id, chain(entries, _values_of(entries)))) != self._ids:
            self._follow()
        settings = self._rule.settings_of(self._optimizer.param_groups)
        if settings != self._settings:
            self._take_settings(settings)
        if used != self._used:
            self._used = list(used)
            for device in self.devices:
                device.activate(self._used)
            self._show_new()
        if self._is_new:
            self._remember()

    def _remember(self) -> None:
        """Note the entries that the optimizer shows."""
        entries = list(self._optimizer.state.values())
        self._shown = [*entries, *_values_of(entries)]
        self._ids = list(map(id, self._shown))
        self._entries, self._own, self._is_new = self._entries_now(), self._own_now(), False

    def _entries_now(self) -> list[Any]:
        return list(map(self._optimizer.state.get, self._parameters))

    def _own_now(self) -> list[Any]:
        """Return the entries that are this object's, without those that the user keeps next to them."""
        state, parameters = self._optimizer.state, self._parameters
        entries = [(i, state.get(parameters[i]) or {}) for i in self._kinds_of]
        return [entry.get(name) for i, entry in entries for name in ("step", *self._kinds_of[i])]

    def _follow(self) -> None:
        """Take over the entries that there are now, if some of this object's are others."""
        entries = self._entries_now()
        if all(map(is_, entries, self._entries)) and all(map(is_, self._own_now(), self._own)):
            self._remember()
            return
        if self.shards > 1:  # the optimizer shows none: those that are still there have theirs
            kept = self.whole()
            for parameter, now, before in zip(self._parameters, entries, self._entries, strict=True):
                if now is not None and now is before:
                    now |= {name: value for name, value in kept[parameter].items() if name not in now}
        self.fill()

    def _take_settings(self, settings: list[list[Any]]) -> None:
        self._rule.check_alike(self._optimizer.param_groups)
        kinds = self._rule.kinds(self._optimizer.param_groups)
        group_kinds = [self._rule.kinds([group]) for group in self._optimizer.param_groups]
        table, kernel = table_of(settings), self._rule.kernel(self._optimizer.param_groups[0])
        is_new = any(kind not in self.devices[0].states for kind in kinds)
        self.generation += is_new
        if is_new or kernel != self._kernel:
            self.launches = []  # also if one of the devices fails below
        for device in self.devices:
            device.allocate(kinds)
            device.groups.copy_(table, non_blocking=True)  # the table is read before the call returns
            if group_kinds != self._group_kinds and not self._rule.counts_steps:
                # A first momentum is the gradient, whenever a group gets momentum.
                device.set_steps([int(i in self._kinds_of) for i in range(len(self._parameters))])
        if not self.launches:
            self.launches = [each for device in self.devices for each in device.launches(kernel)]
        self._settings, self._group_kinds, self._kernel = settings, group_kinds, kernel
        self._show_new()

    def _show_new(self) -> None:
        """Show the state of parameters that are updated for the first time, or get another kind."""
        kinds = [self._rule.kinds([group]) for group in self._optimizer.param_groups]
        for i, is_used in enumerate(self._used):
            if is_used and i in self._likes and self.group_of[i] != NO_GROUP:
                wanted, has = kinds[self.group_of[i]], self._kinds_of.get(i, [])
                if any(kind not in has for kind in wanted):
                    self._kinds_of[i] = [kind for kind in self._rule.states if kind in {*has, *wanted}]
                    self._show(i)

    def _show(self, i: int) -> None:
        self._is_new = True
        entry = self._optimizer.state[self._parameters[i]]
        if self.shards > 1:
            for name in ("step", *self._rule.states):
                entry.pop(name, None)
            return
        device = next(each for each in self._owners if i in each.parameters)
        if self._rule.counts_steps:
            entry["step"] = device.step_view(i)
        for kind in self._kinds_of[i]:
            entry[kind] = device.view(i, kind, self._parameters[i])

    def share_values(self) -> None:
        """Give all devices the new values after an update in shards, unless each keeps its part alone."""
        if self.is_cut:
            return
        for wholes in zip(*(flat.values for flat in self.flats), strict=True):
            parts = [part_of(each, index, self.shards) for index, each in enumerate(wholes)]
            dispatch.all_gather_into(parts, wholes)

    def run(self, factor: float | torch.Tensor | None) -> None:
        """Launch the update on the only device, for a recording, with gradients times ``factor``."""
        if factor is not None:
            self.devices[0].scale_by(factor)
            self.factor, self._is_factor_recorded = None, True
        self._launch(self.devices[0])

    def hold_back(self, if_not_zero: torch.Tensor) -> None:
        """Let the next :meth:`run` change nothing if this number on its device is not 0; the host does not wait."""
        self.devices[0].held_back.copy_(if_not_zero)

    def was_held_back(self) -> bool:
        """Return whether the last launch has changed nothing; waits for the device, and lets later ones go on."""
        held = bool(self.devices[0].held_back)
        if held:
            self.devices[0].held_back.zero_()
        return held

    def replayed(self) -> None:
        """Note that a recorded launch was replayed: the factor is the device's, and schedulers see a step."""
        if self._is_factor_recorded:
            self.factor = None
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def scale_by(self, factor: float | torch.Tensor) -> None:
        """Set the factor of gradients for the next updates, on all devices."""
        for device in self.devices:
            device.scale_by(factor)
        self.factor = None if isinstance(factor, torch.Tensor) else factor

    def spread_gradients(self) -> None:
        """Give all devices the gradients of the first one, whose layout they share."""
        for flat in self.flats[1:]:
            for mine, first in zip(flat.gradients, self.flats[0].gradients, strict=True):
                copy_into(mine, first)

    @torch.no_grad()
    def whole(self) -> State:
        """Return a state in torch's form: compact copies, gathered from all devices, and entries that are not ours.

        Entries that were taken away from the optimizer are left out.
        """
        state: State = defaultdict(dict)
        for parameter, entry in self._optimizer.state.items():
            state[parameter] = dict(entry) if isinstance(entry, dict) else entry
        for i, kinds in self._kinds_of.items():
            if self._parameters[i] not in state:
                continue
            like, entry = self._likes[i], state[self._parameters[i]]
            if self._rule.counts_steps:
                owner = next(each for each in self._owners if i in each.parameters)
                entry["step"] = torch.tensor(float(owner.step_view(i)), dtype=torch.float32, device="cpu")
            for kind in kinds:
                device = torch.device("cpu") if self.is_cut and self.shards > 1 else like.device  # one has no room
                flat = torch.empty(like.numel(), dtype=like.dtype, device=device)
                for owner in self._owners:
                    owner.bring(i, kind, flat)
                entry[kind] = shaped(flat, 0, like)
        return state


def _values_of(entries: list[Any]) -> Iterator[Any]:
    """Return the values in those entries that are dicts: a user may keep others."""
    if not set(map(type, entries)) <= {dict}:
        entries = [each for each in entries if type(each) is dict]
    return chain.from_iterable(map(dict.values, entries))


def _check_dtypes(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.dtype not in FLOATING:
            raise TypeError(
                f"the kernels update float16, bfloat16, float32 and float64, not {parameter.dtype}: use torch.optim's"
            )
