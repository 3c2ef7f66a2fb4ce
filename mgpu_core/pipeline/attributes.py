"""Attributes of modules in a pipeline: each micro-batch has its own, and notes of work that is done once are kept.

A *note* is an attribute that holds nothing of a batch: a number, a text, the handle of a hook, a function.  A module
that changes its layers once, and notes that on itself (``if not self.is_ready: ...``), finds the note in later calls.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from mgpu_core.parallel.first_calls.shared import SharedObjects
from mgpu_core.pipeline.visits import TABLES, Border, OwnForward, attributes_of
from mgpu_core.trees.filled import Contents, FilledCopies, holds_tensor, is_fillable
from mgpu_core.trees.layer_holders import leads_to, rewired
from mgpu_core.trees.marks import changed
from mgpu_core.trees.replica_hooks import have_hooks, own_hooks, users_hooks

__all__ = ["Before", "LaneView"]

_NOTES = (
    *(bool, int, float, complex, str, bytes, type(None), type, FunctionType, MethodType, Enum),
    *(RemovableHandle, torch.dtype, torch.device),
)
_HOOKS = [name for name in vars(Module()) if name.endswith("_hooks")]


def is_note(value: Any) -> bool:
    """Return whether an attribute holds nothing of a batch."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_note, value))
    if isinstance(value, list | set | dict):  # an empty one may be filled by each micro-batch
        return bool(value) and all(map(is_note, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _NOTES)


class LaneView:
    """A module as one micro-batch sees it: modules around layers are others, with attributes of their own.

    Their tables of parameters and buffers, their hooks, and the layers are the same objects.

    Args:
        root: the module.
        shared: ids of modules that all micro-batches share.
        filled: by the ids of modules the names of containers that a forward fills: the view has copies.

    Attributes:
        root: the view.
        copies: of containers that this micro-batch may fill.
    """

    def __init__(self, root: Module, shared: Container[int], filled: Mapping[int, Iterable[str]]) -> None:
        self._shared, self._filled = shared, filled
        self._views: dict[int, tuple[Module, Module, dict[str, Any]]] = {}  # with the attributes of the beginning
        self.copies = FilledCopies()
        self.root = self._viewed(root)
        made = {**self.copies.of_originals, **{owner: view for owner, (_, view, _) in self._views.items()}}
        for _, view, before in self._views.values():
            own = vars(view)
            bound = {name: rewired(value, dict(made)) for name, value in own.items() if isinstance(value, MethodType)}
            if have_hooks(own):  # a table that means nothing of the view stays, for hooks that the forward registers
                tables = own_hooks(own, made)
                bound |= {name: table for name, table in tables.items() if table != own[name]}
            before.update(bound)
            own.update(bound)

    def _viewed(self, module: Module) -> Module:
        if id(module) in self._shared:
            return module
        if id(module) not in self._views:
            view = object.__new__(type(module))
            attributes = {**module.__dict__, "_compiled_call_impl": None}
            self._views[id(module)] = module, view, attributes
            for name in self._filled.get(id(module), ()):
                attributes[name] = self.copies.copied(attributes.get(name))
            if isinstance(own := attributes.get("forward"), OwnForward):
                attributes["forward"] = own.of(view)
            modules = {name: None if each is None else self._viewed(each) for name, each in module._modules.items()}
            attributes["_modules"] = dict(modules)
            object.__setattr__(view, "__dict__", {**attributes, "_modules": modules})
        return self._views[id(module)][1]

    def assigned(self) -> dict[tuple[int, str], Any]:
        """Return the attributes that the forward has assigned, by the id of the module and the name."""
        return {
            (owner, name): value
            for owner, (_, view, before) in self._views.items()
            for name, value in vars(view).items()
            if value is not before.get(name, TABLES) and name not in TABLES
        }

    def keep(self, layers: Container[int] = ()) -> None:
        """Let the module have the notes of this micro-batch; layers, by their ids, have all their attributes."""
        for (owner, name), value in self.assigned().items():
            if owner in layers or is_note(value):
                vars(self._views[owner][0])[name] = value
        for module, view, before in self._views.values():
            for name in before.keys() - vars(view).keys():
                vars(module).pop(name, None)

    def end(self) -> None:
        """Let go of all but the copies."""
        self._views.clear()
        del self.root

    def added(self) -> list[str]:
        """Return the names of modules that the forward has added or replaced."""
        return [
            name
            for _, view, before in self._views.values()
            for name, each in view._modules.items()
            if each is not before["_modules"].get(name)
        ]


class Before:
    """Buffers, attributes, hooks, containers and random numbers, to go back to.

    Args:
        root: the module.
        devices: whose random numbers count, beside the CPU's.
    """

    def __init__(self, root: Module, devices: Sequence[torch.device]) -> None:
        modules = list(root.modules())
        self._buffers = [
            (each._buffers, name, buffer, buffer.clone())
            for each in modules
            for name, buffer in each._buffers.items()
            if buffer is not None
        ]
        self._attributes = [(each, attributes_of(each)) for each in modules]
        self._reset: set[tuple[int, str]] = set()
        self._filled = [
            (each, name, Contents(value))
            for each, own in self._attributes
            for name, value in own.items()
            if is_fillable(value)
        ]
        self._hooks = [(table, dict(table)) for each in modules for table in map(vars(each).__getitem__, _HOOKS)]
        self._of_hooks = SharedObjects(root, of_hooks=True)
        self._marks = self._of_hooks.now()
        self._numbers = torch.get_rng_state()
        others = [each for each in dict.fromkeys(devices) if each.type != "cpu"]
        self._of_devices = [(each, torch.get_device_module(each).get_rng_state(each)) for each in others]

    def changed_of_hooks(self) -> set[str]:
        """Return which objects that hooks alone hold were changed since the last time; all micro-batches share them."""
        before, self._marks = self._marks, self._of_hooks.now()
        return set(changed(before, self._marks))

    def kept_of_a_batch(self, layers: Collection[int]) -> dict[int, set[str]]:
        """Return which modules keep something of a batch, by their ids, with the names of containers that were filled.

        Args:
            layers: the ids of modules that micro-batches share.
        """
        found: dict[int, set[str]] = {}
        for module, name, contents in self._filled:
            value = vars(module).get(name)
            goes_on = contents.held_tensor and not holds_tensor(value, of_graph=True)  # a running value
            is_kept = id(module) not in layers or (holds_tensor(value) and not goes_on)
            if contents.have_changed and is_kept:
                found.setdefault(id(module), set()).add(name)
        around = {id(each) for each, _ in self._attributes} - set(layers)
        around |= {each for module, _, contents in self._filled if id(module) in around for each in contents.ids}
        for module in (each for each, _ in self._attributes if id(each) in layers):
            if any(leads_to(hook, around) for hook in users_hooks(module)):
                found.setdefault(id(module), set())
        for (owner, name), (before, value) in self.changed(layers).items():
            is_new = (owner, name) in self._reset or not holds_tensor(before)
            if holds_tensor(value, of_graph=True) or (is_new and holds_tensor(value)):
                found.setdefault(owner, set())
        return found

    def note_outside(self, layer: Module) -> None:
        """Note which attributes the code around a layer has set, before the first call of the layer."""
        self._reset |= self.changed({id(each) for each in layer.modules()}).keys()

    def running_values(self, layers: Container[int]) -> list[tuple[int, str]]:
        """Return attributes of such modules that go on from tensors to others, by the id of the module and the name."""
        changed = self.changed(layers).items()
        return [each for each, (before, value) in changed if holds_tensor(before) and holds_tensor(value)]

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
        """Go back."""
        self.put_attributes_back()
        with torch.no_grad():
            for table, name, buffer, values in self._buffers:
                table[name] = buffer.copy_(values)
        torch.set_rng_state(self._numbers)
        for device, state in self._of_devices:
            torch.get_device_module(device).set_rng_state(state, device)
