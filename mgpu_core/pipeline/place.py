"""``place``: the layers of a module on several devices, one after the other, through hooks on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from os import PathLike
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.nn import Module

from mgpu_core.devices.devices import DeviceLike, as_devices
from mgpu_core.pipeline.balance import cut_layers, measured_layers
from mgpu_core.pipeline.before import Before
from mgpu_core.pipeline.placement import MOVES, Called, PlacedPart, Placement, Split, tell_parts
from mgpu_core.pipeline.visits import Visit, visit_of
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span
from mgpu_core.trees.filled import FilledContents
from mgpu_core.trees.module_tree import tensors_of
from mgpu_core.trees.moves import refuse_moves
from mgpu_core.trees.nested import tensors_in
from mgpu_core.trees.views import OwnForward
from mgpu_core.trees.weights import weights_of

__all__ = ["DeviceMap", "PlacedCall", "PlacedForward", "is_placed", "place", "placed"]

_CACHE_SHAPE = "_get_static_cache_init_shape"


def place(
    net: Module,
    device_ids: Sequence[DeviceLike],
    split: Sequence[str] | Mapping[str, int] | None = None,
    *,
    sample: Any = None,
    shares: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    weights: str | PathLike[str] | None = None,
    rename: Callable[[str], str | None] | None = None,
) -> Module:
    """Spread the layers of a module over devices; a call then runs on one device after the other.

    A module that holds a list of layers is opened, down to its blocks.  The tensors that enter a layer are brought to
    its device by differentiable copies, the code between layers computes on the device of the layer before it, and the
    output is brought to the device of the first tensor among the arguments.
    Calls of several threads at once take turns on each device, first come, first served.  The first call runs alone;
    if it shows another order of layers than that of registration, and there are no gradients, they are placed anew,
    and it runs again.

    Parameters stay the same objects and keep their gradients.  One that several layers share is on the device of the
    first of them; the others compute with differentiable copies, and share one where gradients are off.  Parameters of
    a module around layers are on the device of the first of these.  Layers that are replaced, wrapped or tied later
    belong to the part of their name.
    ``to``, ``cuda`` and ``cpu`` raise RuntimeError afterwards.  ``print(net)`` begins with the parts; a model of
    transformers on accelerators has them in ``hf_device_map``, too, so that a Trainer leaves it where it is.

    Args:
        net: the module.
        device_ids: as for :class:`mgpu_core.DataParallel`, one per part.
        split: the names of the layers at which the parts after the first begin, in the order of registration; or a
            dict from names of modules to indices of ``device_ids``, where a layer without an entry goes with the one
            before it; or ``None``: the parts get about as many bytes of parameters and buffers each.
        sample: the arguments of a call, as for :func:`mgpu_core.balance`: without ``split``, the parts then take about
            as much time each.
        shares: without ``split``, one positive number per device: how much each can take.
        memory: without ``split``, the bytes that each part may have.
        weights: a file of safetensors, or a folder with some, for a module that was made on meta or in
            :func:`mgpu_core.parameters_on_meta`: each tensor is read straight to its device, in the module's dtype.
        rename: a function from the names in these files to names of the module, or to ``None``, which leaves one out.

    Returns:
        The module itself.

    Raises:
        ValueError: names that are no modules, indices that are no devices, more parts than layers, a cut that
            ``memory`` does not allow, a module that is on several devices already, or that has hooks of accelerate (of
            ``device_map``), buffers that two parts share, files that do not fit the module.  Nothing was moved then.
        MissingExtra: ``weights`` needs the extra ``weights``.
    """
    devices = as_devices(device_ids)
    if split is not None and not isinstance(split, Mapping):
        if len(split) != len(devices) - 1:
            raise ValueError(
                f"{len(devices)} devices need {len(devices) - 1} names in split, one fewer, not {len(split)}"
            )
        split = {name: part for part, name in enumerate(split, 1)}  # which may be called in any order
    placement = placed(net, devices, split, sample=sample, shares=shares, memory=memory, weights=weights, rename=rename)
    PlacedForward(net, placement)
    if hasattr(net, _CACHE_SHAPE):
        net.__dict__[_CACHE_SHAPE] = _no_shape
    net.__dict__.update(dict.fromkeys(MOVES, refuse_moves))
    net.__dict__["extra_repr"] = partial(_text_of, net.extra_repr(), placement.parts)
    # A Trainer asks for it; transformers takes parts on the CPU for weights of a disk, and puts hooks on encoders.
    config: Any = getattr(net, "config", None)
    has_no_encoder = not getattr(config, "is_encoder_decoder", True)
    if has_no_encoder and all(device.type != "cpu" for device in devices):
        net.__dict__["hf_device_map"] = DeviceMap(placement.parts)
    return net


def _text_of(text: str, parts: Sequence[PlacedPart]) -> str:
    """Return the lines with which ``print(net)`` begins."""
    return "\n".join([*filter(None, [text]), *map(str, parts)])


class DeviceMap(Mapping[str, Any]):
    """The devices of a module's layers by name, as transformers has them: a number for CUDA, otherwise a text.

    Args:
        parts: of the module, as they are.
    """

    def __init__(self, parts: Sequence[PlacedPart]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> int | str:
        device = next((part.device for part in self._parts if name in part.layers), None)
        if device is None:
            raise KeyError(name)
        return device.index if device.type == "cuda" else str(device)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(part.layers for part in self._parts)

    def __len__(self) -> int:
        return sum(len(part.layers) for part in self._parts)

    def __repr__(self) -> str:
        return repr(dict(self))


def _no_shape() -> None:
    """Stand in for transformers' shape of a static cache of one device: each layer then makes its own where it is."""


def placed(
    net: Module,
    devices: Sequence[torch.device],
    split: Split,
    *,
    sample: Any,
    shares: Sequence[float] | None,
    memory: Sequence[float] | None,
    weights: str | PathLike[str] | None,
    rename: Callable[[str], str | None] | None,
    recomputes: bool = False,
) -> Placement:
    """Return the placement of a module; see :func:`place`."""
    if split is not None and not (shares is None and memory is None):
        raise ValueError("shares and memory are for a cut that is found, and split says where to cut")
    if (hooked := next((name for name, each in net.named_modules() if hasattr(each, "_hf_hook")), None)) is not None:
        raise ValueError(
            f"{hooked or 'the net'} has a hook of accelerate, which moves tensors between devices by itself: load the "
            "model without device_map, or call accelerate.hooks.remove_hook_from_submodules(net)"
        )
    files = weights_of(net, weights, rename)
    called: Sequence[str] = ()
    if sample is not None:
        layers = measured_layers(net, sample, len(devices))
        called = [each.layers[0] for each in layers]
        if split is None:
            split = cut_layers(layers, len(devices), "time", shares=shares, memory=memory).split
            shares = memory = None
    placement = Placement(net, devices, split, shares=shares, memory=memory, called=called, recomputes=recomputes)
    if files is not None:
        files.load(lambda tensor: placement.devices[placement.stage_of(tensor)])
    return placement


def is_placed(net: Module) -> bool:
    """Return whether a module is one of :func:`place`."""
    return isinstance(net.__dict__.get("forward"), PlacedForward)


class PlacedForward(OwnForward):
    """Stands in for the forward of a placed module: the code between its layers may mix tensors of several devices."""

    def __init__(self, net: Module, placement: Placement) -> None:
        super().__init__(net)
        self.placement = placement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward as one call; in a lane, and again in a backward, it is part of another.

        The first call runs alone, and shows the order of the layers' calls.  Parameters stay where they are while a
        graph may hold them; else they move, and the call runs again, so that caches are where they are.
        """
        if visit_of(self.placement) is not None or _current_graph_task_id() != -1:
            return self.__wrapped__(*args, **kwargs)
        with span("place"):
            return self._whole(args, kwargs)

    def _whole(self, args: Any, kwargs: Any) -> Any:
        placement = self.placement
        placement.follow(self.module)
        if placement.is_known and not placement.is_learning:
            return self._run(args, kwargs)
        with placement.alone.enter():
            if placement.is_known:
                return self._run(args, kwargs)
            placement.is_learning = True
            try:
                return self._first(args, kwargs)
            finally:
                placement.is_learning = False

    def _first(self, args: Any, kwargs: Any) -> Any:
        net, placement, may_move = self.module, self.placement, not torch.is_grad_enabled()
        before = Before(net, placement.devices) if may_move else None
        given = FilledContents((args, kwargs), of_objects=may_move, values=may_move)
        with PlacedCall(placement) as visit, visit.ended():
            visit.watch(placement.around(net))
            output = self._called(visit, args, kwargs)
        if not placement.learn(net, Called(visit.called, visit.used_in), may_move=may_move):
            self._tell(visit)
            return output
        devices = [each.device for each in tensors_of(net)]
        placement.apply(net)
        if before is None or devices == [each.device for each in tensors_of(net)]:
            return output
        before.put_back()
        given.put_back()
        return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        with PlacedCall(self.placement) as visit, visit.ended():
            output = self._called(visit, args, kwargs)
        self._tell(visit)
        return output

    def _tell(self, visit: Visit) -> None:
        """Tell of layers that ran late, and a recording where they are."""
        self.placement.warn_late(self.module, visit.late)
        if tracer.recording is not None:
            tell_parts(self.placement, self.module)

    def _called(self, visit: Visit, args: Any, kwargs: Any) -> Any:
        """Return the output of the forward, on the device of the first tensor that it was given."""
        visit.begin_glue()
        output = self.__wrapped__(*args, **kwargs)
        visit.end_glue()
        given = tensors_in((args, kwargs))
        if given and any(each.device != given[0].device for each in tensors_in(output)):
            return visit.bring_to(given[0].device, output)
        return output


class PlacedCall(Visit):
    """A call of a placed module; several threads that call it at once take turns at its stages, who comes first."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._waiting, self._at = placement.waiting, -1

    def __str__(self) -> str:
        return f"of a call in {threading.current_thread().name}"

    def __enter__(self) -> PlacedCall:
        self.make_current()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._end_turn()
        super().__exit__(*error)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """End the turn after the code inside; so does :meth:`__exit__`, as Ctrl-C may come in the middle of one."""
        try:
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._at >= 0:
            self._waiting.end_turn(self)
            self._at = -1

    def go_to(self, stage: int) -> None:
        """Wait for the turn at a stage."""
        if stage == self._at:
            return
        self._at = stage  # before: Ctrl-C may come as soon as the turn has
        self._waiting.turn(self, stage)
        super().go_to(stage)
        self.make_current()
