"""``place``: the layers of a module on several devices, one after the other, through hooks on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.devices.devices import DeviceLike, as_devices
from mgpu_core.devices.transfer import hand_over
from mgpu_core.pipeline.balance import balance, cut_by_bytes, units_of
from mgpu_core.pipeline.borders import send
from mgpu_core.pipeline.placement import MOVES, is_spread, move_to, named_tensors, refuse_moves
from mgpu_core.trees.module_tree import check_initialised, modules_of
from mgpu_core.trees.nested import map_leaves

__all__ = ["place"]


def place(
    net: Module,
    device_ids: Sequence[DeviceLike],
    split: Sequence[str] | Mapping[str, int] | None = None,
    *,
    sample: Any = None,
) -> Module:
    """Spread the layers of a module over devices; a call then runs on one device after the other.

    The tensors that enter a layer are brought to its device by differentiable copies.  Outputs stay on the device of
    the layer that made them.  The module's own code between its layers must not mix tensors of two devices;
    :class:`mgpu_core.Pipeline` can cut such a module, and keeps all devices busy.

    Parameters stay the same objects and keep their gradients.  One that several layers share is on the device of the
    first of them; the others compute with differentiable copies.  Parameters of a module around layers are on the
    device of the first of these.  ``to``, ``cuda`` and ``cpu`` raise RuntimeError afterwards.

    Args:
        net: the module.
        device_ids: as for :class:`mgpu_core.DataParallel`, one per part.
        split: the names of the layers at which the parts after the first begin, in the order of registration; or a
            dict from names of modules to indices of ``device_ids``, where a layer without an entry goes with the one
            before it; or ``None``: the parts get about as many bytes of parameters and buffers each.
        sample: the arguments of a call, as for :func:`mgpu_core.balance`: without ``split``, the parts then take about
            as much time each.

    Returns:
        The module itself.

    Raises:
        ValueError: names that are no modules, indices that are no devices, more parts than layers, a module that is on
            several devices already; buffers that two parts share.  Nothing was moved then.
    """
    devices = as_devices(device_ids)
    if is_spread(net):
        raise ValueError("the module's parts are on several devices already: make it anew for another placement")
    check_initialised([*net.parameters(), *net.buffers()])
    if split is None:
        split = cut_by_bytes(net, len(devices)) if sample is None else balance(net, sample, len(devices)).split
    starts = _starts(net, split, len(devices))
    layers = [(name, layer, devices[index]) for name, layer, index in _layers(net, starts)]
    homes: dict[int, torch.device] = {}
    for _, layer, device in layers:
        for tensor in (*layer.parameters(), *layer.buffers()):
            homes.setdefault(id(tensor), device)
        for name, buffer in layer.named_buffers():
            if homes[id(buffer)] != device:
                raise ValueError(f"buffer {name!r} of a {type(layer).__name__} belongs to layers on two devices")
    for name, tensor in named_tensors(net):
        around = name.rpartition(".")[0]
        inside = [device for layer, _, device in layers if not around or layer.startswith(f"{around}.")]
        move_to(net, name, homes.get(id(tensor), [*inside, devices[0]][0]))
    for _, layer, device in layers:
        _Border(layer, device)
    net.__dict__.update(dict.fromkeys(MOVES, refuse_moves))
    return net


def _starts(net: Module, split: Sequence[str] | Mapping[str, int], parts: int) -> Mapping[str, int]:
    """Return the part of each name in the split."""
    if not isinstance(split, Mapping):
        if len(split) != parts - 1:
            raise ValueError(
                f"{parts} devices need {parts - 1} names in split, one fewer than devices, not {len(split)}"
            )
        split = {name: index for index, name in enumerate(split, 1)}
    names = dict(net.named_modules())
    for name, index in split.items():
        if name not in names:
            raise ValueError(f"split has {name!r}, which is no module of {type(net).__name__}")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < parts:
            raise ValueError(f"split[{name!r}] must be an index of device_ids, 0 to {parts - 1}, not {index!r}")
    return split


def _layers(net: Module, starts: Mapping[str, int]) -> list[tuple[str, Module, int]]:
    """Return each layer once, and its part: that of the longest name around it, or of the layer before."""
    found: dict[int, tuple[str, Module, int]] = {}
    part = 0
    for name, layer in units_of(net, list(starts)):
        around = [each for each in starts if f"{name}.".startswith(f"{each}.")]
        part = starts[max(around, key=len)] if around else part
        found.setdefault(id(layer), (name, layer, part))
    return list(found.values())


class _Border:
    """Hooks of one layer: they bring its arguments, and parameters that it shares with others, to its device."""

    def __init__(self, layer: Module, device: torch.device) -> None:
        self._device = device
        self._shared = [
            (owner, name)
            for owner in modules_of(layer)
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.device != device
        ]
        self._originals: list[torch.nn.Parameter] = []
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        if self._shared:
            layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, layer: Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        sent: list[torch.Tensor] = []

        def bring(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device == self._device:
                return leaf
            sent.append(send(leaf, self._device))
            return sent[-1]

        moved: tuple[Any, Any] = map_leaves((args, kwargs), bring)
        self._originals = [owner._parameters[name] for owner, name in self._shared]  # type: ignore[misc]
        for owner, name in self._shared:
            owner._parameters[name] = bring(owner._parameters[name])
        hand_over(sent)
        return moved

    def _leave(self, layer: Module, args: Any, output: Any) -> None:
        for (owner, name), parameter in zip(self._shared, self._originals, strict=False):
            owner._parameters[name] = parameter
        self._originals = []
