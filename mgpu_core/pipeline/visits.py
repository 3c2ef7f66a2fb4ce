r"""A call of a module whose layers are on several devices: its own code runs, and hooks do the rest.

The code of a layer runs as it is, with its arguments on the layer's device.  The code around layers, the *glue*
(residual sums, masks, a loss), runs under a function mode, which is off inside layers and brings the tensors of an
operation together on the device of the stage that the call is in::

    glue     mask ───────────── h + skip ─────────── logits * scale    operations pass the mode
    layers         l0    l1               l2    l3                     operations pass nothing
    stage    0     0     0      0 ──────▶ 1     1    1

A layer's hooks find the call by the thread that they run in.  A layer that is called outside a call of the module, or
again in a backward (a checkpoint), has a call of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch._C import _current_graph_task_id, _len_torch_function_stack
from torch.nn import Module
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.checkpoint import checkpoint

from mgpu_core.devices.streams import reach_each_other
from mgpu_core.devices.transfer import copied_so_far, hand_over
from mgpu_core.pipeline.borders import send
from mgpu_core.pipeline.deferred import recomputing
from mgpu_core.pipeline.parameter_copies import ParameterCopies
from mgpu_core.ranks.compiled import outside_the_compiler
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.filled import FilledCopies, Undo, exchanged_back, map_in_place
from mgpu_core.trees.module_tree import ModuleTree, modules_of, parameters_of
from mgpu_core.trees.nested import map_leaves, tensors_in
from mgpu_core.trees.replica_parameters import as_parameters
from mgpu_core.trees.views import ModuleView, OwnForward, StandIns, attributes_of, build_replica, is_note, loosen

__all__ = [
    "Border",
    "Places",
    "Visit",
    "is_in_place",
    "remove_borders",
    "tensors_among",
    "visit_of",
]


class Places(Protocol):
    """The devices of the stages, and the tensors that belong to them."""

    in_backward: dict[torch.device, Visit]
    copies: ParameterCopies

    @property
    def devices(self) -> Sequence[torch.device]:
        """Return the device of each stage."""

    @property
    def recomputes(self) -> bool:
        """Return whether layers keep only their inputs, and run again in backward."""

    @property
    def is_active(self) -> bool:
        """Return whether layers that are called by themselves are served."""

    @property
    def is_deep(self) -> bool:
        """Return whether the mode is on inside layers, too."""

    def stage_of(self, tensor: torch.Tensor, default: int = 0) -> int:
        """Return the stage that a parameter or buffer is at home in; of others the default."""


class Visit:
    """One call in one thread.

    Args:
        places: of the module.

    Attributes:
        stage: that the call is in.
        called: by name the layers that ran, in the order of their first calls, with the stage of each call.
        recomputes: layers keep only their inputs, and run again in backward.
        late: layers whose first call came after a later stage had begun.
        without_grad: a layer ran in ``torch.no_grad()``.
        started: by the ids of tensors, their copies that are on the way to the next stage, with events after them.
        used_in: the names of tensors around layers, with the layer before; for :meth:`watch`.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.stage, self.device = 0, places.devices[0]
        self.called: dict[str, list[int]] = {}
        self.late: list[str] = []
        self.used_in: dict[str, str] = {}
        self.without_grad = False
        self._around: Mapping[int, str] = {}
        self.recomputes = False
        self._furthest = 0
        self._glue, self._height = _Glue(self), 0  # of the stack of modes with the glue's on top; 0: it is not there
        self._running: list[tuple[Border, list[Callable[[], None]]]] = []  # layers, with what ends them
        self._copies: dict[tuple[int, torch.device, bool], tuple[int, torch.Tensor, torch.Tensor]] = {}
        self.started: dict[int, tuple[Any, torch.Event | None]] = {}
        self._outer: Visit | None = None
        self._current = ExitStack()  # the device of this thread

    def __enter__(self) -> Visit:
        self._outer = getattr(_thread, "visit", None)
        _thread.visit = self
        return self

    def __exit__(self, *_: object) -> None:
        """End the call; also one that Ctrl-C has cut off inside a layer."""
        self.end_glue()
        while self._running:
            self._end()
        self._current.close()
        self._glue.visit = None  # no cycle, which would keep the copies
        _thread.visit = self._outer

    def begin_glue(self) -> None:
        """Let operations of this thread pass the mode."""
        self._glue.is_on = True
        if not self._height:
            _push_mode(self._glue)
            self._height = _len_torch_function_stack()

    def end_glue(self) -> None:
        """Let them pass it no more; below a mode of the module's own it stays, and does nothing."""
        self._glue.is_on = False
        if self._height and self._height == _len_torch_function_stack():
            _pop_mode()
            self._height = 0

    def watch(self, around: Mapping[int, str]) -> None:
        """Note from now on where the tensors around layers, named by their ids, are used."""
        self._around = around

    def begin_layer(self, border: Border, layer: Module) -> None:
        """Go to the stage of a layer."""
        is_inside = bool(self._running)
        self._running.append((border, []))
        if not is_inside:
            if not self.places.is_deep:
                self.end_glue()
            self.go_to(border.stage)
        self.without_grad |= not torch.is_grad_enabled()
        self._note(border)

    def _note(self, border: Border) -> None:
        stages = self.called.setdefault(border.name, [])
        if not stages and border.stage < self._furthest:
            self.late.append(border.name)
        stages.append(self.stage)

    def end_layer(self, border: Border) -> None:
        """Go on with the code around layers."""
        if self._running and self._running[-1][0] is border:  # not where a hook before has failed
            self._end()
            if not self._running:
                self.begin_glue()

    def _end(self) -> None:
        for end in self._running.pop()[1]:
            end()

    def call_layer(self, border: Border, layer: Module, stand_in: LayerForward, args: Any, kwargs: Any) -> Any:
        """Run the forward of a layer: of a view of it, where not all its tensors are here; twice, if that is asked."""
        is_repeated = self.recomputes and border.is_wrapped
        forward, modules = stand_in.__wrapped__, modules_of(layer) if stand_in.is_of_view else []
        keep: Callable[[], None] | None = None
        if border.is_wrapped and (self.stage != border.stage or (is_repeated and border.has_foreign)):
            here = _LayerHere(self, border, layer, stand_in)
            forward, modules, keep = here, here.modules, here.keep
        elif border.has_foreign and self.stage == border.stage:
            view = self._with_copies(border, layer)
            forward, keep = vars(view.root)["forward"].__wrapped__, partial(view.keep, lambda *_: True)
        try:
            if not is_repeated or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            again = partial(recomputing, [layer])
            run = _repeated(forward, args, kwargs, modules)
            tensors = tensors_in((args, kwargs))  # whose devices' random numbers are those of the first time
            return checkpoint(run, *tensors, use_reentrant=False, context_fn=lambda: (NULL_CONTEXT, again()))
        finally:
            if keep is not None:
                keep()

    def _with_copies(self, border: Border, layer: Module) -> ModuleView:
        """Return a view of a layer at home, with copies of the parameters that are at home in another stage.

        This call alone has it: calls of other threads do not see the copies.  All else is the layer's own.
        """
        view = ModuleView(layer, border.without_foreign(layer))
        for module in view.modules:
            parameters = module._parameters.items()
            here = {name: None if tensor is None else self.parameter_here(tensor) for name, tensor in parameters}
            vars(module)["_parameters"] = here
        return view

    def go_to(self, stage: int) -> None:
        """Go to a stage."""
        self.stage, self.device = stage, self.places.devices[stage]
        self._furthest = max(self._furthest, stage)

    def make_current(self) -> None:
        """Make the stage's device this thread's current one, until the call ends: some kernels start on that one."""
        self._current.close()
        if self.device.type != "cpu":
            self._current.enter_context(torch.accelerator.device_index(self.device.index))

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device of the stage: copied once, and again after it was written."""
        if tensor.device == self.device or tensor.is_meta:
            return tensor
        key = (id(tensor), self.device, torch.is_grad_enabled())
        version = -1 if tensor.is_inference() else tensor._version
        known = self._copies.get(key)
        if known is None or known[0] != version:
            copy, copied = self.started.pop(id(tensor), None) or (send(tensor, self.device), None)
            known = self._copies[key] = version, copy, tensor
            hand_over([copy], copied)
        return known[1]

    def start(self, stage: int, nest: Any) -> None:
        """Start the copies of a nest's tensors to the next stage, in the turn of this one.

        Started in the next turn, they would wait for what other calls have launched on this stage's device meanwhile.
        The host waits for no such copy: those to the CPU are left to :meth:`bring`.
        """
        device = self.places.devices[stage]
        if device.type != "cpu":
            map_in_place(nest, partial(self._started, device), [])

    def _started(self, device: torch.device, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device or leaf.is_meta or id(leaf) in self.started:
            return leaf
        has_copy = (id(leaf), device, torch.is_grad_enabled()) in self._copies
        if not has_copy and reach_each_other(leaf.device, device) and (copy := self.begun(leaf, device)) is not None:
            self.started[id(leaf)] = copy, copied_so_far(device)
        return leaf

    def begun(self, tensor: torch.Tensor, device: torch.device) -> Any:
        """Return a copy on another device that has begun; ``None``: it is not to begin yet."""
        return send(tensor, device)

    def bring_to(self, device: torch.device, nest: Any, undo: Undo | None = None) -> Any:
        """Return a nest with its tensors brought to a device; another stage's device that it names becomes this one.

        Args:
            device: the device.
            nest: the nest.
            undo: containers are filled in place, and get their own entries back by it; ``None``: they are made anew.
        """
        here, self.device = self.device, device
        try:
            return map_leaves(nest, self._brought) if undo is None else map_in_place(nest, self._brought, undo)
        finally:
            self.device = here

    def bring_arguments(self, device: torch.device, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a layer on its device; containers get their own entries back after the layer."""
        here, self.device = self.device, device
        undo: Undo = []
        copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # of arguments, with their versions before the layer

        def brought(leaf: Any) -> Any:
            copied = self._brought(leaf)
            if copied is not leaf and isinstance(leaf, torch.Tensor) and not copied.is_inference():
                copies.append((leaf, copied, copied._version))
            return copied

        try:
            args = tuple([brought(e) if type(e) is torch.Tensor else map_in_place(e, brought, undo) for e in args])
            return args, {name: map_in_place(each, brought, undo) for name, each in kwargs.items()}
        finally:
            self.device = here
            self.started.clear()
            if undo:
                self._running[-1][1].append(partial(exchanged_back, undo))
            if copies:
                self._running[-1][1].append(partial(self._write_back, copies))

    def _write_back(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        """Write the copies of a layer's arguments back that it has written."""
        for tensor, copied, version in copies:
            key = (id(tensor), copied.device, torch.is_grad_enabled())
            if copied._version != version and key in self._copies and self._copies[key][1] is copied:
                back = send(copied, tensor.device)
                hand_over([back])
                tensor.copy_(back)
                self._copies[key] = tensor._version, copied, tensor

    def _brought(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.bring(leaf) if leaf.requires_grad or leaf.device != self.device else leaf
        return self.device if isinstance(leaf, torch.device) and leaf in self.places.devices else leaf

    def bring_together(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of an operation between layers: on one device, if they are on several."""
        tensors = tensors_among((args, kwargs))
        for tensor in tensors if self._around else ():
            if id(tensor) in self._around:
                self.used_in.setdefault(self._around[id(tensor)], next(reversed(self.called), ""))
        # Torch itself takes scalars anywhere.
        places = {each.device for each in tensors if each.ndim or not each.is_cpu}
        if len(places) < 2:
            return args, kwargs
        device = tensors[0].device if is_in_place(function, kwargs) else self.device
        return self.bring_to(device, (args, kwargs))  # type: ignore[no-any-return]

    def bring_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter that is at home in another stage on the device of this one."""
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return self.places.copies.on(parameter, self.device)
        self.places.copies.drop(parameter)
        return self.bring(parameter)

    def parameter_here(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter on the device of this stage: itself, if it is at home here."""
        is_here = self.places.stage_of(parameter) == self.stage and parameter.device == self.device
        return parameter if is_here else self.bring_parameter(parameter)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Let the threads of autograd find this call: of a device's, while the call has its turn."""
        if self.device.type == "cpu":  # whose nodes this thread runs
            yield
            return
        self.places.in_backward[self.device] = self
        try:
            yield
        finally:
            del self.places.in_backward[self.device]

    def passed_on(self, border: Border, output: Any, given: Any) -> Any:
        """Return the output of a layer, which was given these arguments, for the code after it."""
        return output

    def stage_again(self, border: Border) -> int:
        """Return the stage in which a layer ran that a backward runs again."""
        earlier = [stage for stage in self.called.get(border.name, ()) if stage <= self.stage]
        return max(earlier, default=border.stage)


_thread = threading.local()


def visit_of(places: Places) -> Visit | None:
    """Return this thread's call of a placed module; in a thread of autograd that whose backward it runs."""
    visit: Visit | None = getattr(_thread, "visit", None)
    while visit is not None and visit.places is not places:
        visit = visit._outer
    if visit is None and places.in_backward and _current_graph_task_id() != -1:
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return places.in_backward.get(torch.device(kind.type, torch.accelerator.current_device_index()))
    return visit


class _OfLayer(Visit):
    """The call of one layer by itself; in a backward, which runs it again as ``outer`` did."""

    def __init__(self, places: Places, border: Border, outer: Visit | None) -> None:
        super().__init__(places)
        super().go_to(border.stage if outer is None else outer.stage_again(border))
        self.recomputes = (
            outer.recomputes if outer is not None else places.recomputes and _current_graph_task_id() != -1
        )

    def __enter__(self) -> Visit:
        self.make_current()
        return super().__enter__()

    def go_to(self, stage: int) -> None:
        """Stay in the stage of the layer."""

    def begin_glue(self) -> None:
        """End the call with its layer: no code follows that belongs to it."""
        self.__exit__()


class Border:
    """The hooks of one layer.

    Args:
        places: of the module.
        name: of the layer.
        layer: the layer.
        stage: its own.
        next_stage: the stage after it, if it is known to be the last layer of its own.
        is_wrapped: whether it may run in another stage than its own, or twice.

    Attributes:
        has_foreign: parameters of the layer are at home in another stage.
    """

    def __init__(
        self, places: Places, name: str, layer: Module, stage: int, next_stage: int | None, *, is_wrapped: bool
    ) -> None:
        self.places, self.name, self.stage, self.next_stage = places, name, stage, next_stage
        self.is_wrapped = is_wrapped
        foreign = {id(each) for each in parameters_of(layer) if places.stage_of(each) != stage}
        self.has_foreign = bool(foreign)
        modules = modules_of(layer) if foreign else []
        self._without_foreign = [  # the indices of modules
            index for index, module in enumerate(modules) if foreign.isdisjoint(map(id, parameters_of(module)))
        ]
        if is_wrapped or self.has_foreign:
            LayerForward(layer, self)
        layer.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        self._leaves = layer.register_forward_hook(self.leave, with_kwargs=True, always_call=True).id

    def without_foreign(self, layer: Module) -> set[int]:
        """Return the ids of the layer's modules, or of a view's, of which no parameter is at home in another stage."""
        modules = modules_of(layer)
        return {id(modules[index]) for index in self._without_foreign}

    @outside_the_compiler
    def enter(self, layer: Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin the layer; return its arguments on its device."""
        visit = visit_of(self.places)
        if visit is None or _current_graph_task_id() != -1:
            if not self.places.is_active and not self._is_spread(layer):
                return args, kwargs
            visit = _OfLayer(self.places, self, visit).__enter__()
        if self.stage > visit.stage:
            visit.start(self.stage, (args, kwargs))
        visit.begin_layer(self, layer)
        device = visit.device if self.is_wrapped else self.places.devices[self.stage]
        return visit.bring_arguments(device, args, kwargs)

    def _is_spread(self, layer: Module) -> bool:
        """Return whether a layer of a copy is on its device, and there are others."""
        tensor = next(chain(layer.parameters(), layer.buffers()), None)
        is_at_home = tensor is not None and tensor.device == self.places.devices[self.stage]
        return is_at_home and len(set(self.places.devices)) > 1

    @outside_the_compiler
    def leave(self, layer: Module, args: Any, kwargs: Any, output: Any) -> Any:
        """End the layer; return its output for the code after it."""
        visit = visit_of(self.places)
        if visit is None:
            return output
        visit.end_layer(self)
        is_last = next(reversed(layer._forward_hooks)) == self._leaves  # other hooks are of this turn, too
        if self.next_stage is None or not is_last or output is None:  # None after a failure
            return output
        return visit.passed_on(self, output, (args, kwargs))


def remove_borders(root: Module) -> None:
    """Take the hooks off all layers of a module, also those of an earlier placement.

    By the tables of this module: a copy has hooks whose handles belong to the module that it was copied from.
    """
    for module in root.modules():
        hooks = module._forward_pre_hooks, module._forward_hooks
        of_borders = [
            number
            for table in hooks
            for number, hook in table.items()
            if isinstance(getattr(hook, "__self__", None), Border)
        ]
        kinds = module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs
        for table in (*hooks, *kinds, module._forward_hooks_always_called):
            for number in of_borders:
                table.pop(number, None)
        if isinstance(forward := vars(module).get("forward"), LayerForward):
            forward.remove()


class LayerForward(OwnForward):
    """Stands in for the forward of a layer that a call may run otherwise: by a replica, or twice."""

    def __init__(self, layer: Module, border: Border) -> None:
        super().__init__(layer)
        self._border = border

    @outside_the_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        visit = visit_of(self._border.places)
        if visit is None:
            return self.__wrapped__(*args, **kwargs)
        return visit.call_layer(self._border, self.module, self, args, kwargs)


class _LayerHere:
    """The forward of a layer with all its tensors in the stage of a call: of a replica, which this call alone has.

    Args:
        visit: the call.
        border: of the layer.
        layer: the layer, or a call's view of it.
        stand_in: for its forward.

    Attributes:
        modules: of the replica.
    """

    def __init__(self, visit: Visit, border: Border, layer: Module, stand_in: LayerForward) -> None:
        tree = ModuleTree(layer)
        parameters = [visit.parameter_here(each) for each in tree.parameters]
        with torch.no_grad():
            buffers = list(map(visit.bring, tree.buffers))
        self.modules: list[Module] = build_replica(tree, parameters, buffers, ())
        as_parameters(tree.parameters, [parameters])
        self._originals = [node.module for node in tree.nodes]
        self._visit, self._device, self._home = visit, visit.device, visit.places.devices[border.stage]
        self._is_shared = visit.stage != border.stage and not stand_in.is_of_view
        self._sent = [(copy, copy._version) for own, copy in zip(tree.buffers, buffers, strict=True) if copy is not own]
        self._stand_ins: StandIns | None = None
        root = self.modules[0]
        if type(root) is type(layer):
            vars(root).pop("forward", None)
            of_originals = dict(zip(map(id, self._originals), self.modules, strict=True))
            self._forward = stand_in.of(root, of_originals).__wrapped__
        else:  # of a compiled layer, whose replica is of the module in it
            self._forward = root.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; tensors in attributes are brought here, too, in containers that the replica alone has."""
        copies, undo = FilledCopies(), Undo()
        for module in self.modules:
            for name, value in attributes_of(module).items():
                vars(module)[name] = self._visit.bring_to(self._device, copies.copied(value), undo)
        if self._stand_ins is None:
            self._copies = copies
            self._stand_ins = StandIns(zip(self._originals, self.modules, strict=True))
        try:
            return self._forward(*args, **kwargs)
        finally:
            exchanged_back(undo)

    def keep(self) -> None:
        """Let the layer have what the forward has assigned, at home.

        A layer that micro-batches share gets notes alone.  What its call at home has kept of a batch stays, and tells
        that each of them needs a view of it.
        """
        if any(copy._version != version for copy, version in self._sent):
            warn_user(
                f"a {type(self._originals[0]).__name__} writes its buffers where it is called again, in another stage "
                "than its own: that is lost, and only its calls at home count. Put the border after its last call"
            )
        if self._stand_ins is not None:
            self._copies.merge()
            self._stand_ins.keep(
                lambda _, before, value: not self._is_shared or (is_note(before) and is_note(value)),
                lambda value: value if is_note(value) else self._visit.bring_to(self._home, value),
            )
        loosen(self.modules[:1])


def _repeated(forward: Callable[..., Any], args: Any, kwargs: Any, modules: Sequence[Module]) -> Callable[..., Any]:
    """Return a forward that runs again in backward from the containers, objects and attributes of its first time.

    It lets go of the first ones: a cache among them holds the graph, and the graph holds what runs again.

    Args:
        forward, args, kwargs: the call.
        modules: whose attributes it may change.
    """
    given, first = FilledCopies(of_objects=True).copied((args, kwargs)), [(args, kwargs)]
    attributes = [(vars(each), dict(vars(each))) for each in modules]

    def run(*_: torch.Tensor) -> Any:
        if first:
            args, kwargs = first.pop()
            return forward(*args, **kwargs)
        args, kwargs = FilledCopies(of_objects=True).copied(given)
        now = [dict(own) for own, _ in attributes]
        try:
            for table, of_first in attributes:
                table.update(of_first)
            return forward(*args, **kwargs)
        finally:
            for (table, _of_first), since in zip(attributes, now, strict=True):
                table.update(since)

    return run


_LOOKS = {
    *("__get__", "__len__", "__repr__", "__format__", "__hash__", "size", "dim", "ndimension", "numel", "nelement"),
    *("stride", "storage_offset", "element_size", "is_contiguous", "is_floating_point", "is_complex", "type"),
    *("data_ptr", "get_device", "detach", "register_hook", "retain_grad"),
}
"""Functions that compute nothing with a tensor's values that goes on."""


class _Glue(TorchFunctionMode):
    """Bring the tensors of operations between layers together."""

    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self.visit: Visit | None = visit
        self.is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_on and self.visit is not None and getattr(func, "__name__", "") not in _LOOKS:
            args, kwargs = self.visit.bring_together(func, args, kwargs)
        return func(*args, **kwargs)


def is_in_place(function: Any, kwargs: Any) -> bool:
    """Return whether an operation writes into its first tensor, or into ``out=``."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None


def tensors_among(values: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments of an operation, which takes lists and tuples at most."""
    tensors: list[torch.Tensor] = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list | dict):
            tensors += tensors_among(value)
    return tensors
