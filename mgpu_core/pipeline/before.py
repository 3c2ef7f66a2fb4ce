"""The state of a module before a call: attributes, hooks, containers and buffers, to compare with and to go back to."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.devices.plug_ins import numbers_of, put_numbers_back
from mgpu_core.parallel.first_calls.shared import SharedObjects
from mgpu_core.pipeline.visits import Border
from mgpu_core.trees.filled import FilledContents, holds_tensor, is_fillable
from mgpu_core.trees.layer_holders import leads_to
from mgpu_core.trees.marks import changed
from mgpu_core.trees.replica_hooks import users_hooks
from mgpu_core.trees.views import OwnForward, attributes_of

__all__ = ["Before"]

_HOOKS = [name for name in vars(Module()) if name.endswith("_hooks")]


class Before:
    """Buffers, attributes, hooks, containers and random numbers, to go back to.

    Args:
        root: the module.
        devices: whose random numbers count, beside the CPU's.
    """

    def __init__(self, root: Module, devices: Sequence[torch.device]) -> None:
        modules = list(root.modules())
        self._buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._attributes = [(each, attributes_of(each)) for each in modules]
        self._reset: set[tuple[int, str]] = set()
        self._filled = [
            (module, name, FilledContents(value))
            for module, attributes in self._attributes
            for name, value in attributes.items()
            if is_fillable(value)
        ]
        self._hooks = [(table, dict(table)) for each in modules for table in map(vars(each).__getitem__, _HOOKS)]
        self._root, self._of_hooks = root, SharedObjects(of_hooks=True)
        self._marks = self._of_hooks.now(root)
        self._numbers = torch.get_rng_state()
        self._of_devices = numbers_of(devices)

    def changed_of_hooks(self) -> set[str]:
        """Return which objects that hooks alone hold were changed since the last time; all micro-batches share them."""
        before, self._marks = self._marks, self._of_hooks.now(self._root)
        return set(changed(before, self._marks))

    def kept_of_a_batch(self, layers: Collection[int]) -> dict[int, set[str]]:
        """Return which modules keep something of a batch, by their ids, with the names of containers that were filled.

        Args:
            layers: the ids of modules that micro-batches share.
        """
        kept: dict[int, set[str]] = {}
        for module, name, contents in self._filled:
            value = vars(module).get(name)
            goes_on = contents.held_tensor and not holds_tensor(value, of_graph=True)  # a running value
            is_kept = id(module) not in layers or (holds_tensor(value) and not goes_on)
            if contents.have_changed and is_kept:
                kept.setdefault(id(module), set()).add(name)
        around = {id(each) for each, _ in self._attributes} - set(layers)
        around |= {each for module, _, contents in self._filled if id(module) in around for each in contents.ids}
        for module in (each for each, _ in self._attributes if id(each) in layers):
            if any(leads_to(hook, around) for hook in users_hooks(module)):
                kept.setdefault(id(module), set())
        for (owner, name), (before, value) in self.changed(layers).items():
            is_new = (owner, name) in self._reset or not holds_tensor(before)
            if holds_tensor(value, of_graph=True) or (is_new and holds_tensor(value)):
                kept.setdefault(owner, set())
        return kept

    def note_outside(self, layer: Module) -> None:
        """Note which attributes the code around a layer has set, before the first call of the layer."""
        self._reset |= self.changed({id(each) for each in layer.modules()}).keys()

    def running_values(self, layers: Container[int]) -> list[tuple[int, str]]:
        """Return attributes of such modules that go on from tensors to others, by the id of the module and the name."""
        pairs = self.changed(layers).items()
        return [each for each, (before, value) in pairs if holds_tensor(before) and holds_tensor(value)]

    def changed(self, layers: Container[int]) -> dict[tuple[int, str], tuple[Any, Any]]:
        """Return the attributes of such modules that have changed, with their values before and now."""
        return {
            (id(module), name): (before.get(name), value)
            for module, before in self._attributes
            if id(module) in layers
            for name, value in attributes_of(module).items()
            if value is not before.get(name)
        }

    def put_attributes_back(self) -> None:
        """Give modules the attributes, the hooks and the contents of before; those of a placement stay."""
        for module, before in self._attributes:
            for name in attributes_of(module).keys() - before.keys():
                del vars(module)[name]
            standing_in = {name for name, value in vars(module).items() if isinstance(value, OwnForward)}
            vars(module).update({name: value for name, value in before.items() if name not in standing_in})
        for _, _, contents in self._filled:
            contents.put_back()
        for table, hooks in self._hooks:
            for key, hook in list(table.items()):
                if key not in hooks and not isinstance(getattr(hook, "__self__", None), Border):
                    del table[key]
            for key, hook in hooks.items():
                if not isinstance(getattr(hook, "__self__", None), Border):
                    table.setdefault(key, hook)

    def put_back(self) -> None:
        """Give the module the attributes, buffers and random numbers that it had before the call."""
        self.put_attributes_back()
        with torch.no_grad():
            for table, name, buffer, values in self._buffers:
                table[name] = buffer.copy_(values)
        torch.set_rng_state(self._numbers)
        put_numbers_back(self._of_devices)
