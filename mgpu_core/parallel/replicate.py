"""Replicate: one twin of the module per rank, whose parameters are differentiable copies of the original's.

Nothing is remembered between two forwards but plans: a twin is made from the module as it is now, so whatever the user
changed is seen.  Making twins is pure Python and happens in every forward, so it is written for speed: the module tree
is walked once, not once per rank, and ordinary modules are copied by their dictionaries.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.nn import Module

from mgpu_core.comm import autograd
from mgpu_core.comm import dispatch as collectives
from mgpu_core.comm.dispatch import copies_of
from mgpu_core.comm.facts import tell_contents
from mgpu_core.device.compiled import compiled_calls
from mgpu_core.device.devices import DeviceLike
from mgpu_core.device.team import Team
from mgpu_core.module_tree import ModuleTree, Place, check_initialised
from mgpu_core.record import span, telling
from mgpu_core.twin_hooks import SHARES_HOOKS, keep_hooks_apart

__all__ = ["loosen", "replicate"]

M = TypeVar("M", bound=Module)

_COMPILED = "_compiled_call_impl"  # what a module's call runs instead of its forward, if it is there
_BOUND = "_twin_methods"  # of a replica: which of its modules' attributes hold bound methods


def replicate(network: M, devices: Sequence[DeviceLike], detach: bool = False) -> list[M]:
    """One replica of ``network`` per rank.

    Args:
        network: its parameters and buffers on ``devices[0]``.
        devices: one per rank.
        detach: without gradients (forwards under ``no_grad``).

    Returns:
        The replicas, in rank order.  Rank 0's parameters and buffers are the network's own storage, the others' are
        fresh.  As in torch, a replica's parameters are plain attributes: ``parameters()`` is empty,
        ``_former_parameters`` has them.

    Raises:
        ValueError: a parameter that has not been initialised (lazy modules), before anything is copied.
        TypeError: a module that was compiled in a way that cannot be repeated for its replicas.
        RuntimeError: Python modules inside a ScriptModule.
    """
    team = Team.of(devices)
    keep_hooks_apart()
    with span("replicate"):
        tree = ModuleTree(network)
        tensors = [*tree.parameters.tensors, *tree.buffers.tensors]
        check_initialised(tensors)
        calls = _compiled_calls(tree, len(team))
        if not detach:
            _tell_buckets(network, tree.parameters.tensors)
        copies = _copy_tensors(tensors, team, detach)
        split = len(tree.parameters.tensors)
        return [_build(tree, copies[rank][:split], copies[rank][split:], calls[rank]) for rank in team.ranks]


@telling
def _tell_buckets(network: Module, parameters: Sequence[torch.Tensor]) -> None:
    """What the buckets of the broadcast, and of the gradients on their way back, are made of."""
    names = {id(parameter): name for name, parameter in Module.named_parameters(network)}  # not a class's selection
    tracked = [parameter for parameter in parameters if parameter.requires_grad]
    for bucket, positions in enumerate(autograd.gradient_buckets(tracked)):
        tell_contents("replicate", bucket, [(names[id(tracked[i])], tracked[i]) for i in positions])


def _copy_tensors(tensors: Sequence[torch.Tensor], team: Team, detach: bool) -> list[list[torch.Tensor]]:
    """``result[rank][i]``: differentiable copies of those that require grad, plain copies of the others."""
    result: list[list[Any]] = [[None] * len(tensors) for _ in team.ranks]
    tracked = [] if detach else [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    plain = [i for i, tensor in enumerate(tensors) if detach or not tensor.requires_grad]
    if tracked:
        for rank, copies in enumerate(autograd.broadcast_buckets(team, [tensors[i] for i in tracked])):
            for i, copy in zip(tracked, copies, strict=True):
                result[rank][i] = copy
    if plain:
        # Buffers are kept by modules, and must be ordinary tensors even when this forward is for inference only.
        with torch.no_grad(), torch.inference_mode(False):
            table = [copies_of(tensors[i], team.devices) for i in plain]
            collectives.broadcast_into([tensors[i] for i in plain], table)
            for i, row in zip(plain, table, strict=True):
                for rank, copy in enumerate(row):
                    result[rank][i] = copy.detach() if copy.requires_grad else copy
    return result


def _compiled_calls(tree: ModuleTree, ranks: int) -> list[list[tuple[int, Any]]]:
    """Per rank, the compiled modules by number and what their twins of that rank call."""
    found = [
        (number, compiled_calls(place.module, place.compiled, ranks))
        for number, place in enumerate(tree.places)
        if place.compiled is not None
    ]
    return [[(number, calls[rank]) for number, calls in found] for rank in range(ranks)]


def _build(
    tree: ModuleTree,
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    compiled: Sequence[tuple[int, Any]],
) -> Any:
    """The twins of all modules, wired to each other and to this rank's tensors; returns the first, the network's."""
    new, assign = object.__new__, object.__setattr__
    twins = [
        new(place.kind) if place.template is not None else place.module._replicate_for_data_parallel()
        for place in tree.places
    ]
    bound: list[tuple[Module, str]] = []
    for place, twin in zip(tree.places, twins, strict=True):
        if place.template is not None:
            # Past Module.__setattr__, which would find out for each value what it is.
            assign(twin, "__dict__", _attributes(place, place.template, twins, parameters, buffers))
        else:
            _wire_by_setattr(place, twin, twins, parameters, buffers)
        for name, function, owner in place.methods:
            twin.__dict__[name] = MethodType(function, twins[owner])
            bound.append((twin, name))
    for number, function in compiled:
        twins[number].__dict__[_COMPILED] = MethodType(function, twins[number])
        bound.append((twins[number], _COMPILED))
    if bound:
        twins[0].__dict__[_BOUND] = bound
    return twins[0]


def _attributes(
    place: Place,
    template: dict[str, Any],
    twins: list[Any],
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """A twin's ``__dict__``: its parameters are plain attributes, its other dictionaries its own."""
    attributes = template.copy()
    if place.parameters:
        former = {name: parameters[number] for name, number in place.parameters}
        attributes["_former_parameters"] = former
        attributes.update(former)
    attributes["_parameters"] = dict.fromkeys(place.absent) if place.absent else {}
    own = attributes["_buffers"] = template["_buffers"].copy()
    if place.buffers:
        for name, number in place.buffers:
            own[name] = buffers[number]
    below = attributes["_modules"] = template["_modules"].copy()
    if place.children:
        for name, number in place.children:
            below[name] = twins[number]
    return attributes


def loosen(replicas: Iterable[Module]) -> None:
    """Ends the cycles of replicas that keep methods of their own, so that they are freed when their graph is.

    A bound method in an attribute holds its module, which holds the attribute: the copies of all parameters would stay
    until the garbage collector comes.  After the forward such an attribute holds its module weakly; whoever took the
    method itself (a checkpoint that runs it again in backward) still has the real one.
    """
    for replica in replicas:
        for twin, name in replica.__dict__.pop(_BOUND, ()):
            method = twin.__dict__.get(name)
            if type(method) is MethodType:
                twin.__dict__[name] = _WeakMethod(method)


class _WeakMethod:
    __slots__ = ("_method",)

    def __init__(self, method: MethodType) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        if method is None:
            raise ReferenceError("the replica of this method is gone")
        return method(*args, **kwargs)


def _wire_by_setattr(
    place: Place, twin: Any, twins: list[Any], parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> None:
    """For modules with a say in it: RNNs keep a second list of their weights, ScriptModules live in C++."""
    twin._former_parameters = {}
    if "_forward_hooks" in twin.__dict__:  # a ScriptModule keeps its own in C++
        twin.__dict__[SHARES_HOOKS] = True
    for name, number in place.children:
        setattr(twin, name, twins[number])
    for name, number in place.parameters:
        setattr(twin, name, parameters[number])
        twin._former_parameters[name] = parameters[number]
    for name, number in place.buffers:
        setattr(twin, name, buffers[number])
    for name in place.absent:
        twin._parameters[name] = None
