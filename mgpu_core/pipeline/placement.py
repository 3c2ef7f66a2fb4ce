"""The device of each layer and tensor of a module, and the hooks on its layers."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import inf
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter, Sequential

from mgpu_core.devices.transfer import to_device
from mgpu_core.pipeline.layers import (
    Layers,
    checked_shares,
    cut_by_bytes,
    in_order,
    largest_block,
    layers_of,
    writes_its_input,
)
from mgpu_core.pipeline.visits import Border, Visit, remove_borders
from mgpu_core.ranks.waiting import Waiting
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.module_tree import check_initialised, modules_of, named_parameters_of, tensors_of

__all__ = ["MOVES", "Called", "Placement", "Split", "give_memory", "is_spread", "refuse_moves"]

MOVES = ("to", "to_empty", "cpu", "cuda", "ipu", "mtia", "xpu", torch._C._get_privateuse1_backend_name())
"""The methods of a module that would bring it to one device; the last is of a plug-in for torch."""

Split = Sequence[str] | Mapping[str, int] | None
"""The names of layers at which parts begin; or the parts of some modules; or nothing, for a cut by bytes."""


def is_spread(module: Module) -> bool:
    """Return whether the parts of a module were put on several devices, by ``place`` or ``Pipeline``."""
    return getattr(module.to, "__func__", module.to) is refuse_moves


def refuse_moves(*args: Any, **kwargs: Any) -> Any:
    """Stand in for ``to``, ``cuda`` and ``cpu`` of a module whose parts are on several devices.

    Raises:
        RuntimeError: it would bring all parts to one device.
    """
    raise RuntimeError(
        "this module's parts are on several devices: to(), cuda() and cpu() would bring them all to one. Change dtypes "
        "with half(), float(), bfloat16() or double(); for another placement, make it anew from the module"
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
    """

    starts: Sequence[str] | Mapping[str, int]
    layers: list[tuple[str, Module, int]]
    homes: dict[int, int]


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
        devices, split: the same.
        is_known: whether the order of the calls is known.
        known: forms of calls that have been run.
        in_backward: by device the call whose backward runs there now.
        waiting: the waits of calls of several threads for their turns at the stages.
        alone: held by a call that finds the order of the calls, or layers that have changed.
        is_active: False for a copy until it is used: a copy of a Pipeline's module alone runs as a plain module.
        searches: the numbers of autograd's nodes do not tell their stages, because other threads have made some.
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
        self.split, self._memory = split, memory
        self._shares = checked_shares(shares, len(devices))
        names = list(called) or (root._modules if type(root).forward is Sequential.forward else [])
        self._called = Called(dict.fromkeys(names, (0,)), {})
        self.is_known = bool(names)
        self._called_again = frozenset[str]()
        self.recomputes, self.is_deep, self.searches = recomputes, False, False
        self.known: set[Hashable] = set()
        self._has_warned = False
        self._of_this_object()
        self._layout = self._found(root)
        self._apply(root)
        self.is_active = True

    def _of_this_object(self) -> None:
        """Make all that a copy does not share: it finds its layers when it is used."""
        self._layout = _Layout([], [], {})
        self._contents: Any = None
        self._inside: set[int] = set()  # ids of layers, and of the modules in them
        self.in_backward: dict[torch.device, Visit] = {}
        self.waiting, self.alone = Waiting({}, ()), threading.RLock()
        self.is_active = False

    def __getstate__(self) -> dict[str, Any]:
        own = {"_layout", "_contents", "_inside", "in_backward", "waiting", "alone", "is_active"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

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
        with self.alone:
            if self._contents == _contents_of(root):
                return False
            self._layout = self._found(root)
            self._apply(root)
            self.known.clear()
            return True

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
            Whether some tensor or layer has another stage now, or is run in another way.

        Raises:
            ValueError: the names of a split are not in the order of the calls.
        """
        before = self._layout, self._called, self._called_again
        is_first = not self.is_known and any(device.type != "cpu" for device in self.devices)
        again = {name for name, stages in called.stages.items() if len(set(stages)) > 1}
        self._called, self._called_again, self.is_known = called, self._called_again | again, True
        self._layout = self._found(root)
        if not may_move and any(
            each.device != self.devices[self.stage_of(each)] for each in root.parameters() if not each.is_meta
        ):
            self._layout, self._called, self._called_again = before
            return False
        if not is_first and (before[0], before[2]) == (self._layout, self._called_again):
            return False
        self._apply(root)
        return True

    def around(self, root: Module) -> dict[int, str]:
        """Return the names of the tensors that are in no layer, by their ids."""
        layers = [layer for _, layer, _ in self._layout.layers]
        inside = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
        return {id(each): name for name, each in _named_tensors(root) if id(each) not in inside}

    def _found(self, root: Module) -> _Layout:
        """Find the layers, their stages and the homes of all tensors; nothing is moved."""
        devices, split = self.devices, self.split
        names = _checked_names(root, split, len(devices))
        largest = largest_block(root, len(devices)) if split is None else inf
        layers = in_order(layers_of(root, names, largest), self._called.stages)
        starts = cut_by_bytes(layers, self._shares, self._memory) if split is None else split
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
        return _Layout(starts, placed, homes)

    def _apply(self, root: Module) -> None:
        """Move all tensors home, and put hooks on the layers."""
        starts, layers, homes = self._layout
        named = {name: homes[id(tensor)] for name, tensor in _named_tensors(root)}  # moving may change ids
        for name, part in named.items():
            _move_to(root, name, self.devices[part])
        homes = {id(tensor): named[name] for name, tensor in _named_tensors(root)}
        self._layout = _Layout(starts, layers, homes)
        self._inside = {id(each) for _, layer, _ in layers for each in modules_of(layer)}
        remove_borders(root)
        following = [part for _, _, part in layers[1:]]
        for (name, layer, part), after in zip(layers, [*following, 0], strict=True):
            is_wrapped = name in self._called_again or (self.recomputes and not writes_its_input(layer))
            is_last = len(self._called.stages.get(name, ())) == 1 and after > part
            Border(self, name, layer, part, after if is_last else None, is_wrapped=is_wrapped)
        self._contents, self.is_active = _contents_of(root), True

    def view(self, root: Module) -> Module:
        """Return a view of the module for one lane: modules around layers are others, with attributes of their own.

        Their tables of parameters and buffers, their hooks, and the layers are the same objects.
        """
        made: dict[int, Module] = {}

        def viewed(module: Module) -> Module:
            if id(module) in self._inside:
                return module
            view = made.get(id(module))
            if view is None:
                view = made[id(module)] = object.__new__(type(module))
                modules = {name: None if each is None else viewed(each) for name, each in module._modules.items()}
                attributes = {**module.__dict__, "_modules": modules, "_compiled_call_impl": None}
                object.__setattr__(view, "__dict__", attributes)
            return view

        return viewed(root)

    def warn_assigned(self, root: Module, view: Module) -> None:
        """Warn of attributes that a forward has assigned to a view, which is gone after the call."""
        names = [
            f"{path}.{name}".lstrip(".")
            for path, module in root.named_modules()
            if id(module) not in self._inside
            for name, value in vars(view.get_submodule(path)).items()
            if name not in _OF_VIEWS and value is not vars(module).get(name, _OF_VIEWS)
        ]
        if names:
            warn_user(
                f"the forward of {type(root).__name__} assigns {', '.join(names)}: each micro-batch has attributes of "
                "its own, and the values are lost after the call. Return them, or keep them in a layer or in a buffer "
                "that is changed in place"
            )

    def check(self, root: Module) -> None:
        """Raise RuntimeError if a parameter or buffer is on another device than that of its stage."""
        for tensor in tensors_of(root):
            device = self.devices[self.stage_of(tensor)]
            if tensor.device != device:
                name = next(name for name, each in _named_tensors(root) if each is tensor)
                raise RuntimeError(f"{name} must be on {device}, where its stage runs, but is on {tensor.device}")


_OF_VIEWS = {"_modules", "_compiled_call_impl"}  # that a view does not share with its module


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
    """Return ids that are equal as long as no module or parameter was added, replaced or taken away."""
    modules = list(modules_of(root))
    tables: list[dict[str, Any]] = [each._modules for each in modules] + [each._parameters for each in modules]
    return [list(map(len, tables)), list(map(id, chain.from_iterable(map(dict.values, tables))))]


def _move_to(root: Module, name: str, device: torch.device) -> None:
    """Move a tensor of the module in place: a Parameter stays the same object, and keeps its gradient."""
    owner_name, _, last = name.rpartition(".")
    owner = root.get_submodule(owner_name)
    parameter = owner._parameters.get(last)
    if parameter is None:
        owner._buffers[last] = to_device(owner._buffers[last], device)  # type: ignore[arg-type]
    elif parameter.device != device and not parameter.is_meta:  # weights are loaded to their devices
        moved = to_device(parameter.data, device)
        grad = None if parameter.grad is None else to_device(parameter.grad, device)
        parameter.grad = None
        give_memory(parameter, moved)
        parameter.grad = grad


def give_memory(parameter: Parameter, moved: torch.Tensor) -> None:
    """Let a parameter have the memory of a tensor, and stay the same object."""
    try:
        parameter.data = moved
    except RuntimeError:  # of another kind of device: torch exchanges all of the two tensors, attributes too
        other = torch.Tensor._make_subclass(type(parameter), moved, parameter.requires_grad)
        other.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, other)
