"""The device of each layer and tensor of a module, and the hooks on its layers."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import inf
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Sequential

from mgpu_core.devices.exclusive import Exclusive
from mgpu_core.devices.transfer import to_device
from mgpu_core.pipeline.before import Before
from mgpu_core.pipeline.layers import (
    Layers,
    checked_shares,
    cut_by_bytes,
    in_order,
    largest_block,
    layers_of,
    writes_its_input,
)
from mgpu_core.pipeline.parameter_copies import ParameterCopies
from mgpu_core.pipeline.visits import Border, Visit, remove_borders
from mgpu_core.ranks.waiting import Waiting
from mgpu_core.support.tables import human_nbytes
from mgpu_core.support.warnings import warn_user
from mgpu_core.trace.events import Parts
from mgpu_core.trace.tracer import emit, when_tracing
from mgpu_core.trees.module_tree import check_initialised, modules_of, named_parameters_of, tensors_of
from mgpu_core.trees.moves import give_memory, is_spread
from mgpu_core.trees.nested import tensors_in
from mgpu_core.trees.views import ModuleView, is_note

__all__ = ["MOVES", "Called", "PlacedPart", "Placement", "Split"]

MOVES = ("to", "to_empty", "cpu", "cuda", "ipu", "mtia", "xpu", torch._C._get_privateuse1_backend_name())
"""The methods of a module that would bring it to one device; the last is of a plug-in for torch."""

Split = Sequence[str] | Mapping[str, int] | None
"""The names of layers at which parts begin; or the parts of some modules; or nothing, for a cut by bytes."""


_LOST = (
    "each micro-batch has attributes of its own, does not see what another has assigned, and the values are lost after "
    "the call. Return them, or keep them in a layer or in a buffer that is changed in place"
)
_COUNTED = (
    "each micro-batch of a call begins with the value from before it, so it counts calls, where one device counts "
    "micro-batches. Keep it in a layer or in a buffer that is changed in place"
)
_LATE = (
    "a call after the first does so, in each micro-batch at once: what it does once, such as hooks on layers, was done "
    "several times, and numbers may differ from now on. Do it before the first call"
)
_FROM_OUTSIDE = (
    "a hook or another closure sets it on the module itself, where code between layers does not see it, but the value "
    "of the call before. Let the hook be a method of the module, or return the value"
)
_OF_HOOKS = (
    "micro-batches share it, and each changes it, so code that reads it finds what another has left. Keep it in an "
    "attribute of the module, of which each micro-batch has its own: in a dict or a list, or set by a method of it"
)
_RUNNING = (
    "the micro-batches of a stage go on from one another's value, so code outside of the layer reads that of any. Keep "
    "running values in a buffer that is changed in place; if it is of one batch, set it to None before the first call"
)


class Called(NamedTuple):
    """The calls of a module's layers, as far as they are known.

    Attributes:
        stages: the names of the layers in the order of their first calls, with the stage of each call.
        used_in: by the names of tensors around layers, the layer in whose stage they are used.
    """

    stages: Mapping[str, Sequence[int]]
    used_in: Mapping[str, str]


class _Layout(NamedTuple):
    """Where layers and tensors belong.

    Attributes:
        starts: where stages after the first begin, in order, or the stages of some modules.
        layers: with their names and stages, in the order of their calls as far as it is known, else of registration.
        homes: of each tensor, by its id, the first stage that uses it.
        named: the same by names.
    """

    starts: Sequence[str] | Mapping[str, int]
    layers: list[tuple[str, Module, int]]
    homes: dict[int, int]
    named: dict[str, int]


class PlacedPart(NamedTuple):
    """The part of a module that is on one device.

    Attributes:
        device: where it is.
        layers: the names of its layers, in the order of their calls as far as it is known.
        nbytes: of the parameters and buffers that are at home there.
    """

    device: torch.device
    layers: tuple[str, ...]
    nbytes: int

    def __str__(self) -> str:
        ends = dict.fromkeys((*self.layers[:1], *self.layers[-1:]))
        return f"{self.device}: {' to '.join(ends) or 'no layers'}, {human_nbytes(self.nbytes)}"


@when_tracing
def tell_parts(placement: Placement, root: Module) -> None:
    """Tell a recording where the layers of a module are."""
    parts = tuple(placement.parts)  # which a later call may change
    emit(lambda host_ns, thread: Parts(id(placement), type(root).__name__, parts, host_ns, thread))


class Placement:
    """The layers of a module and their stages, and the home of each tensor: the first stage that uses it.

    Args:
        root: the module.
        devices: one per stage.
        split: where to cut.
        shares, memory: of the devices, for a cut by bytes.
        called: the names of layers in the order of their calls; empty: not known yet.
        recomputes: layers may keep only their inputs, and run again in backward.

    Attributes:
        devices: the same.
        is_known: whether the order of the calls is known.
        known: forms of calls that have been run.
        in_backward: by device the call whose backward runs there now.
        copies: of parameters, in stages that are not their home; calls without gradients share them.
        waiting: the waits of calls of several threads for their turns at the stages.
        alone: held by a call that finds the order of the calls, or layers that have changed.
        is_learning: a call of a placed module finds the order of the calls.
        is_active: False for a copy until it is used: a copy of a Pipeline's module alone runs as a plain module.
        searches: the numbers of autograd's nodes do not tell their stages, because other threads have made some.
        of_last_call: tensors with a graph that layers keep of the call before, by id, with the names of attributes.
        parts: of the module, one per device; the same list as long as the placement lives.
        is_deep: layers take tensors of other stages out of objects such as caches; operations in layers pass the mode.

    Raises:
        ValueError: names that are no modules, stages that are no devices, more parts than layers, a module that is on
            several devices already; parameters without a shape; buffers of two devices.  Nothing was moved then.
    """

    def __init__(
        self,
        root: Module,
        devices: Sequence[torch.device],
        split: Split,
        *,
        shares: Sequence[float] | None = None,
        memory: Sequence[float] | None = None,
        called: Iterable[str] = (),
        recomputes: bool = False,
    ) -> None:
        if is_spread(root):
            raise ValueError("the module's parts are on several devices already: make it anew for another placement")
        check_initialised([*root.parameters(), *root.buffers()])
        self.devices: Sequence[torch.device] = list(devices)
        self._cut = split, checked_shares(shares, len(devices)), memory
        names = list(called) or (root._modules if type(root).forward is Sequential.forward else [])
        self._called = Called(dict.fromkeys(names, (0,)), {})
        self.is_known = bool(names)
        self._called_again = frozenset[str]()
        self.recomputes, self.is_deep, self.searches = recomputes, False, False
        self.known: set[Hashable] = set()
        self._has_warned = False
        self.parts: list[PlacedPart] = []
        self._of_this_object()
        self._layout = self._found(root)
        self.apply(root)
        self.is_active = True

    def _of_this_object(self) -> None:
        """Make all that a copy does not share: it finds its layers when it is used."""
        self._layout = _Layout([], [], {}, {})
        self._contents: Any = None
        self._inside: set[int] = set()  # ids of layers, and of the modules in them
        self._shared: set[int] = set()  # those of them that micro-batches share
        self._noted: set[tuple[int, str]] = set()  # attributes that were noted so far
        self.of_last_call: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._from_outside: list[tuple[int, str]] = []  # attributes that something else than a forward has set
        self._of_hooks: set[str] = set()  # objects that hooks alone hold, and the first micro-batch has changed
        self._own: dict[int, set[str]] = {}  # ids of modules that keep something of a batch, with their containers
        self.in_backward: dict[torch.device, Visit] = {}
        self.copies = ParameterCopies()
        self.waiting = Waiting({}, ())
        self.alone = Exclusive("the first call of a placed module, in another thread, did not end")
        self.is_active = self.is_learning = False

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_layout", "_contents", "_inside", "_shared", "_noted", "_own", "_from_outside", "of_last_call"}
        left_out |= {"copies", "in_backward", "waiting", "alone", "is_active", "is_learning"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._of_this_object()

    @property
    def starts(self) -> list[str]:
        """The names at which stages after the first begin, or whose stages were given."""
        return list(self._layout.starts)

    def stage_of(self, tensor: torch.Tensor, default: int = 0) -> int:
        """Return the stage that a parameter or buffer is at home in; of others the default."""
        return self._layout.homes.get(id(tensor), default)

    def follow(self, root: Module) -> bool:
        """Place layers and tensors that were replaced, wrapped or tied since; return whether there were any.

        A new layer belongs to the part of its name.
        """
        if self._contents == _contents_of(root):
            return False
        with self.alone.enter():
            has_changed: bool = self._contents != _contents_of(root)  # unless another call was first
            if has_changed:
                self._layout = self._found(root)
                self.apply(root)
                self.known.clear()
            return has_changed

    def look_closer(self) -> None:
        """Look for tensors of other stages inside layers, too; next time for nodes of other threads instead."""
        self.is_deep, self.searches = not self.is_deep, self.is_deep

    def warn_late(self, root: Module, names: Sequence[str]) -> None:
        """Warn once of layers that ran in a later stage than their own."""
        if names and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"layers of {type(root).__name__} were called after a later stage had begun, and ran in its turn: "
                f"{', '.join(names)}. Give the cut in the order of the calls, or sample=, the arguments of a call"
            )

    def learn(self, root: Module, called: Called, *, may_move: bool = True) -> bool:
        """Note the order of the calls of a first call, and cut again if need be.

        Args:
            root: the module.
            called: in which order its layers were called.
            may_move: whether parameters may go to other devices; else all stays as it is if they had to.

        Returns:
            Whether some tensor or layer has another stage now, or is run in another way: after :meth:`apply`.

        Raises:
            ValueError: the names of a split are not in the order of the calls.
        """
        before = self._layout, self._called, self._called_again
        is_first = not self.is_known and any(device.type != "cpu" for device in self.devices)
        again = {name for name, stages in called.stages.items() if len(set(stages)) > 1}
        self._called, self._called_again, self.is_known = called, self._called_again | again, True
        self._layout = self._found(root)
        if not may_move and any(
            parameter.device != self.devices[self.stage_of(parameter)]
            for parameter in root.parameters()
            if not parameter.is_meta
        ):
            self._layout, self._called, self._called_again = before
            return False
        return is_first or (before[0], before[2]) != (self._layout, self._called_again)

    def around(self, root: Module) -> dict[int, str]:
        """Return the names of the tensors that are in no layer, by their ids."""
        layers = [layer for _, layer, _ in self._layout.layers]
        inside = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
        return {id(each): name for name, each in _named_tensors(root) if id(each) not in inside}

    def _found(self, root: Module) -> _Layout:
        """Find the layers, their stages and the homes of all tensors; nothing is moved."""
        devices, (split, shares, memory) = self.devices, self._cut
        names = _checked_names(root, split, len(devices))
        largest = largest_block(root, len(devices)) if split is None else inf
        layers = in_order(layers_of(root, names, largest), self._called.stages)
        starts = cut_by_bytes(layers, shares, memory) if split is None else split
        parts = starts if isinstance(starts, Mapping) else {name: part for part, name in enumerate(starts, 1)}
        placed = list(_parts_of(layers, parts))
        if self.is_known and not isinstance(starts, Mapping):
            _check_order(placed, starts)
        homes: dict[int, int] = {}
        for _, layer, part in placed:
            for tensor in (*layer.parameters(), *layer.buffers()):
                homes.setdefault(id(tensor), part)
            for name, buffer in layer.named_buffers():
                if devices[homes[id(buffer)]] != devices[part]:
                    raise ValueError(f"buffer {name!r} of a {type(layer).__name__} belongs to layers on two devices")
        stages = {name: part for name, _, part in placed}
        for name, tensor in _named_tensors(root):
            if id(tensor) not in homes:
                around = name.rpartition(".")[0]
                inside = (part for layer, _, part in placed if not around or layer.startswith(f"{around}."))
                before = self._called.used_in.get(name)  # its name is empty where no layer was called before
                homes[id(tensor)] = next(inside, 0) if before is None else stages.get(before, 0)
        return _Layout(starts, placed, homes, {name: homes[id(tensor)] for name, tensor in _named_tensors(root)})

    def apply(self, root: Module) -> None:
        """Move all tensors home, and put hooks on the layers."""
        layers, named = self._layout.layers, self._layout.named
        moving = {name: self.devices[part] for name, part in named.items()}
        _check_movable(root, moving)
        with torch.inference_mode(False):  # they may be trained later
            for name, device in moving.items():
                _move_to(root, name, device)
        self._find_shared()
        self.copies.clear()
        remove_borders(root)
        following = [part for _, _, part in layers[1:]]
        for (name, layer, part), after in zip(layers, [*following, 0], strict=True):
            is_wrapped = name in self._called_again or (self.recomputes and not writes_its_input(layer))
            is_last = len(self._called.stages.get(name, ())) == 1 and after > part
            Border(self, name, layer, part, after if is_last else None, is_wrapped=is_wrapped)
        self._contents, self.is_active = _contents_of(root), True
        if (parts := list(self._parts_of(root))) != self.parts:  # which calls that are watched must not seem to change
            self.parts[:] = parts

    def _parts_of(self, root: Module) -> Iterator[PlacedPart]:
        tensors = {id(tensor): tensor for _, tensor in _named_tensors(root)}.values()
        for stage, device in enumerate(self.devices):
            layers = tuple([name for name, _, part in self._layout.layers if part == stage])
            yield PlacedPart(device, layers, sum(each.nbytes for each in tensors if self.stage_of(each) == stage))

    def view(self, root: Module) -> ModuleView:
        """Return a view of the module for one micro-batch."""
        return ModuleView(root, self._shared, self._own)

    def learn_kept(self, root: Module, before: Before) -> bool:
        """Note which modules keep something of a batch; return whether there are others than were known."""
        kept = before.kept_of_a_batch(self._shared)
        around = {id(each) for each in root.modules()} - self._inside
        self._from_outside = list(before.changed(around))  # this micro-batch itself has views of them
        self._of_hooks = before.changed_of_hooks()
        is_new = any(owner not in self._own or names - self._own[owner] for owner, names in kept.items())
        for owner, names in kept.items():
            self._own[owner] = self._own.get(owner, set()) | names
        self._find_shared()
        return is_new

    def _find_shared(self) -> None:
        """Find the modules in layers that micro-batches share: all but those of layers that keep something."""
        parts = [{id(each) for each in modules_of(layer)} for _, layer, _ in self._layout.layers]
        self._inside = set().union(*parts)
        self._shared = set().union(*(each for each in parts if not each & self._own.keys()))

    def keep_attributes(self, root: Module, views: Mapping[int, ModuleView], before: Before | None = None) -> None:
        """Let the module have the notes of its micro-batches, and the containers that they have filled.

        Warns once of attributes that are not as on one device.

        Args:
            root: the module.
            views: of the micro-batches.
            before: the module before the call, if it was the first of its form.
        """
        for _, view in sorted(views.items()):
            view.copies.merge()
        last = views[max(views)]
        noted = {key for key, value in last.assigned().items() if is_note(value)}
        if before is not None or (len(views) > 1 and not noted <= self._noted):
            self._warn_of_attributes(root, views, noted, before)
        self._noted |= noted
        last.keep_notes(self._inside)
        self.of_last_call = {
            id(tensor): (weakref.ref(tensor), name)
            for (_, name), value in last.assigned().items()
            for tensor in tensors_in(value)
            if tensor.grad_fn is not None
        }

    def _warn_of_attributes(
        self, root: Module, views: Mapping[int, ModuleView], noted: set[tuple[int, str]], before: Before | None
    ) -> None:
        paths = {id(each): path for path, each in root.named_modules()}

        def named(keys: Iterable[tuple[int, str]]) -> str:
            return ", ".join(
                dict.fromkeys(f"{paths[owner]}.{name}".lstrip(".") for owner, name in keys if owner in paths)
            )

        assigned = {index: each.assigned() for index, each in views.items()} if before is not None else {}
        lost = [key for key, each in assigned.get(0, {}).items() if key[0] not in self._inside and not is_note(each)]
        counted = [
            key
            for index, values in assigned.items()
            for key in values.keys() & assigned[0].keys()
            if index and is_note(values[key]) and values[key] != assigned[0][key]
        ]
        late = [] if before is not None else noted - self._noted
        running = before.running_values(self._shared) if before is not None else []
        outside = self._from_outside if before is not None else []
        told = (lost, _LOST), (counted, _COUNTED), (late, _LATE), (running, _RUNNING), (outside, _FROM_OUTSIDE)
        for keys, text in told:
            if names := named(keys):
                warn_user(f"the forward of {type(root).__name__} assigns {names}: {text}")
        if before is not None and (again := self._of_hooks.intersection(before.changed_of_hooks())):
            warn_user(f"the forward of {type(root).__name__} changes {', '.join(sorted(again))}: {_OF_HOOKS}")

    def check(self, root: Module) -> None:
        """Raise RuntimeError if a parameter or buffer is on another device than that of its stage."""
        if all(each.device == self.devices[self.stage_of(each)] for each in tensors_of(root)):
            return
        homes = self._layout.homes  # of buffers that a forward has replaced, the home is that of their name
        homes.update({id(each): self._layout.named.get(name, 0) for name, each in _named_tensors(root)})
        for name, tensor in _named_tensors(root):
            device = self.devices[self.stage_of(tensor)]
            if tensor.device != device:
                raise RuntimeError(f"{name} must be on {device}, where its stage runs, but is on {tensor.device}")


def _checked_names(root: Module, split: Split, parts: int) -> list[str]:
    """Return the names of the split."""
    if split is None:
        return []
    known = dict(root.named_modules(remove_duplicate=False))
    for name in split:
        if name not in known:
            raise ValueError(f"split has {name!r}, which is no module of {type(root).__name__}")
    for name, part in split.items() if isinstance(split, Mapping) else ():
        if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < parts:
            raise ValueError(f"split[{name!r}] must be an index of device_ids, 0 to {parts - 1}, not {part!r}")
    return list(split)


def _parts_of(layers: Layers, starts: Mapping[str, int]) -> Iterator[tuple[str, Module, int]]:
    """Yield each layer with its part: that of the longest name around it, or of the layer before."""
    part = 0
    for name, layer in layers:
        around = [each for each in starts if f"{name}.".startswith(f"{each}.")]
        part = starts[max(around, key=len)] if around else part
        yield name, layer, part


def _check_order(layers: Sequence[tuple[str, Module, int]], starts: Sequence[str]) -> None:
    """Raise ValueError if a layer is called after a stage has begun that follows its own, or before the first."""
    for (_, _, before), (name, _, part) in pairwise(layers):
        if part < before:
            later = starts[before - 1]
            raise ValueError(f"split point {name!r} is called after {later!r}: list them in the forward's order")
    if layers and layers[0][2]:
        raise ValueError(
            f"no layer is called before split point {starts[layers[0][2] - 1]!r}: the first stage is empty"
        )


def _named_tensors(root: Module) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers, each once."""
    return [*named_parameters_of(root), *root.named_buffers()]


def _contents_of(root: Module) -> list[Any]:
    """Return ids that are equal as long as no module, parameter or forward was added, replaced or taken away."""
    modules = modules_of(root)
    tables: list[dict[str, Any]] = [each._modules for each in modules] + [each._parameters for each in modules]
    forwards = [id(vars(each).get("forward")) for each in modules[1:]]
    return [list(map(len, tables)), list(map(id, chain.from_iterable(map(dict.values, tables)))), forwards]


def _check_movable(root: Module, devices: Mapping[str, torch.device]) -> None:
    """Raise RuntimeError if a graph holds a tensor that would go to another kind of device."""
    for name, tensor in _named_tensors(root):
        count = tensor._use_count()  # type: ignore[attr-defined]
        if tensor.device.type != devices[name].type and not tensor.is_meta and count > 1 + tensor.requires_grad:
            raise RuntimeError(
                f"{name} cannot be moved to {devices[name]}: the graph of an earlier forward holds it. Let go of that "
                "forward's output (del output), or call it in torch.no_grad(); nothing was moved"
            )


def _move_to(root: Module, name: str, device: torch.device) -> None:
    """Move a tensor of the module in place: it stays the same object, and a Parameter keeps its gradient."""
    owner_name, _, last = name.rpartition(".")
    owner = root.get_submodule(owner_name)
    parameter = owner._parameters.get(last)
    buffer = owner._buffers.get(last)
    if buffer is not None and buffer.device != device and not buffer.is_meta:
        give_memory(buffer, to_device(buffer.detach(), device))
    if parameter is not None and parameter.device != device and not parameter.is_meta:  # those are loaded there
        moved = to_device(parameter.data, device)
        grad = None if parameter.grad is None else to_device(parameter.grad, device)
        parameter.grad = None
        give_memory(parameter, moved)
        parameter.grad = grad
