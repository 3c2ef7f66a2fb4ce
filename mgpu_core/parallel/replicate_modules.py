"""Replicate: one copy of the module per rank, whose parameters are differentiable copies of the original's.

Nothing is remembered between two forwards but plans: a replica is made from the module as it is now, with all that the
user has changed.  Making replicas is pure Python, in every forward, so it is written for speed: the module tree
is walked once, not once per rank, and ordinary modules are copied by their dictionaries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.nn import Module

from mgpu_core.comm import autograd, dispatch
from mgpu_core.comm.dispatch import copies_of
from mgpu_core.comm.trace_hooks import trace_contents
from mgpu_core.devices.devices import DeviceLike
from mgpu_core.devices.traces import refuse_traces
from mgpu_core.ranks.compiled import compiled_calls
from mgpu_core.ranks.team import Team
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span, when_tracing
from mgpu_core.trees import replica_hooks
from mgpu_core.trees.layer_holders import rewired
from mgpu_core.trees.module_tree import ModuleNode, ModuleTree, check_initialised
from mgpu_core.trees.replica_hooks import DICTIONARIES, NO_HOOKS, WeakMethod, have_hooks, own_hooks, weakened
from mgpu_core.trees.replica_parameters import as_parameters, follow_attributes

__all__ = ["build_replica", "compiled_by_rank", "loosen", "plain_copies", "replicate", "replicate_tree"]

M = TypeVar("M", bound=Module)

_COMPILED = "_compiled_call_impl"  # what a module's call runs instead of its forward, if it is there
_REWIRED = "_replica_holders"  # of a replica: which attributes of its modules were made again, as (module, name)


def replicate(network: M, devices: Sequence[DeviceLike], detach: bool = False) -> list[M]:
    """Return one replica of ``network`` per rank.

    Args:
        network: its parameters and buffers on ``devices[0]``.
        devices: one per rank.
        detach: without gradients (forwards under ``no_grad``).

    Returns:
        The replicas, in rank order.  Rank 0's parameters and buffers are the network's own storage, the others' are
        fresh.  Other than torch's, a replica has its parameters: ``parameters()``, ``state_dict()`` and
        ``torch.func.functional_call`` see the rank's copies, which are no leaves.

    Raises:
        ValueError: a parameter that has not been initialised (lazy modules), before anything is copied.
        TypeError: a module that was compiled in a way that cannot be repeated for its replicas.
        RuntimeError: Python modules inside a ScriptModule.
    """
    refuse_traces()
    team, tree = Team.of(devices), ModuleTree(network)
    check_initialised(tree.tensors, network)
    replicas: list[M] = replicate_tree(tree, team, detach)
    return replicas


def replicate_tree(tree: ModuleTree, team: Team, detach: bool) -> list[Any]:
    """Return one replica per rank of a network that was just read, and whose tensors are initialised."""
    ranks = len(team.ranks)
    with NULL_CONTEXT if tracer.sink is None else span("replicate"):
        calls = compiled_by_rank(tree, ranks) if tree.is_compiled else [()] * ranks
        if tracer.recording is not None and not detach:
            _trace_buckets(tree.nodes[0].module, tree.parameters)
        tensors, split = tree.tensors, len(tree.parameters)
        copies = _copy_tensors(tensors, team, detach)
        follow_attributes(tensors, copies)
        return [build_replica(tree, copies[rank][:split], copies[rank][split:], calls[rank]) for rank in team.ranks]


@when_tracing
def _trace_buckets(network: Module, parameters: Sequence[torch.Tensor]) -> None:
    """Emit the contents of the buckets of the broadcast and of the gradients."""
    names = {id(parameter): name for name, parameter in Module.named_parameters(network)}  # not a class's selection
    tracked = [parameter for parameter in parameters if parameter.requires_grad]
    for bucket, positions in enumerate(autograd.gradient_buckets(tracked)):
        trace_contents("replicate", bucket, [(names[id(tracked[i])], tracked[i]) for i in positions])


def _copy_tensors(tensors: Sequence[torch.Tensor], team: Team, detach: bool) -> list[list[torch.Tensor]]:
    """Return ``result[rank][i]``: differentiable copies of those that require grad, plain copies of the others."""
    tracked = [] if detach else [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if not tracked:
        return plain_copies(tensors, team)
    result: list[list[Any]] = [[None] * len(tensors) for _ in team.ranks]
    plain = [i for i, tensor in enumerate(tensors) if not tensor.requires_grad]
    for indices, rows in (
        (tracked, autograd.broadcast_buckets(team.devices, [tensors[i] for i in tracked])),
        (plain, plain_copies([tensors[i] for i in plain], team)),
    ):
        for rank, copies in enumerate(rows):
            for i, copy in zip(indices, copies, strict=True):
                result[rank][i] = copy
    return result


def plain_copies(tensors: Sequence[torch.Tensor], team: Team) -> list[list[torch.Tensor]]:
    """Return ``result[rank][i]``, without gradients: rank 0's are the tensors' own storage, the others' are fresh.

    They are ordinary tensors even when this forward pass is for inference only, because modules keep buffers.
    """
    if not tensors:
        return [[] for _ in team.ranks]
    with torch.no_grad(), torch.inference_mode(False):
        table = [copies_of(tensor, team.devices) for tensor in tensors]
        dispatch.broadcast_into(tensors, table)
        return [[copy.detach() if copy.requires_grad else copy for copy in row] for row in zip(*table, strict=True)]


def compiled_by_rank(tree: ModuleTree, ranks: int) -> list[list[tuple[int, Any]]]:
    """Return, per rank, the compiled modules by the index of their nodes, with the callable of that rank's replica.

    Raises:
        TypeError: a module that was compiled in a way that cannot be repeated for its replicas.
    """
    found = [
        (index, compiled_calls(node.module, node.compiled, ranks))
        for index, node in enumerate(tree.nodes)
        if node.compiled is not None
    ]
    return [[(index, calls[rank]) for index, calls in found] for rank in range(ranks)]


def build_replica(
    tree: ModuleTree,
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor] | None,
    compiled: Sequence[tuple[int, Any]],
    *,
    leaves: bool = False,
) -> Any:
    """Return a rank's replica of the tree's network: copies of all modules, wired to each other and to its tensors.

    Args:
        tree: the network as it is now.
        parameters, buffers: of the rank, in the tree's order; ``None``: the modules' own tables of buffers.
        compiled: for each compiled module the index of its node, and the callable of its replica.
        leaves: the parameters are ``nn.Parameter``; otherwise they are made :class:`ReplicaParameter`.
    """
    if not replica_hooks.are_apart:
        replica_hooks.keep_hooks_apart()
    new, assign = object.__new__, object.__setattr__
    replicas = [
        new(type(node.module)) if node.kind.is_ordinary else node.module._replicate_for_data_parallel()
        for node in tree.nodes
    ]
    held: list[tuple[Module, str]] = []
    hooked: list[tuple[ModuleNode, Any]] = []
    for node, replica in zip(tree.nodes, replicas, strict=True):
        if node.kind.is_ordinary:
            # Past Module.__setattr__, which would find out for each value what it is.
            assign(replica, "__dict__", _attributes(node, replicas, parameters, buffers))
        else:
            _wire_by_setattr(node, replica, replicas, parameters, tree.buffers if buffers is None else buffers, leaves)
        if replica_hooks.SHARES_HOOKS not in replica.__dict__:
            hooked += ((node, replica),)
    if not leaves:
        as_parameters(tree.parameters, parameters)
    if tree.has_holders or hooked:
        made = {key: replicas[index] for key, index in tree.indices.items()}
        for node, replica in hooked:
            replica.__dict__.update(own_hooks(node.module.__dict__, made))
            held += [(replica, name) for name in DICTIONARIES]
        for node, replica in zip(tree.nodes, replicas, strict=True):
            for name in node.holders:
                replica.__dict__[name] = rewired(node.module.__dict__[name], made)
                held.append((replica, name))
    for index, function in compiled:
        replicas[index].__dict__[_COMPILED] = MethodType(function, replicas[index])
        held.append((replicas[index], _COMPILED))
    if held:
        replicas[0].__dict__[_REWIRED] = held
    return replicas[0]


def _attributes(
    node: ModuleNode,
    replicas: list[Any],
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor] | None,
) -> dict[str, Any]:
    """Return a replica's ``__dict__``: its tensors and modules are its own, other attributes are the module's."""
    original = node.module.__dict__
    own: dict[str, Any] = dict.fromkeys(node.absent) if node.absent else {}
    attributes = {**original, "_is_replica": True, "_former_parameters": own, "_parameters": own}
    # Written out: a call per module and rank would cost more than it does.
    has_hooks = original["_forward_hooks"] or original["_forward_pre_hooks"]
    if not (has_hooks or original["_backward_hooks"] or original["_backward_pre_hooks"]):
        attributes |= NO_HOOKS
    for name, index in node.parameters:
        own[name] = parameters[index]
    if buffers is not None:
        below = attributes["_buffers"] = {**original["_buffers"]}
        for name, index in node.buffers:
            below[name] = buffers[index]
    below = attributes["_modules"] = {**original["_modules"]}
    for name, index in node.children:
        below[name] = replicas[index]
    return attributes


def loosen(replicas: Iterable[Module]) -> None:
    """End the cycles of replicas that keep methods of their own, so that they are freed when their graph is.

    A bound method in an attribute holds its module, which holds the attribute: the copies of all parameters would stay
    until the garbage collector comes.  After the forward such an attribute holds its module weakly; code that took the
    method itself (a checkpoint that runs it again in backward) still has the real one.
    """
    for replica in replicas:
        for module, name in replica.__dict__.pop(_REWIRED, ()):
            value = module.__dict__.get(name)
            if type(value) is MethodType:
                module.__dict__[name] = WeakMethod(value)
            elif name in DICTIONARIES and value:
                module.__dict__[name] = OrderedDict((key, weakened(hook)) for key, hook in value.items())


def _wire_by_setattr(
    node: ModuleNode,
    replica: Any,
    replicas: list[Any],
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    leaves: bool,
) -> None:
    """Wire a module that has a say in it: RNNs keep a second list of their weights, ScriptModules live in C++."""
    replica._former_parameters = {}  # torch's name for a replica's parameters
    if "_forward_hooks" in replica.__dict__ and not have_hooks(replica.__dict__):  # a ScriptModule keeps its own in C++
        replica.__dict__.update(NO_HOOKS)
    for name, index in node.children:
        setattr(replica, name, replicas[index])
    for name, index in node.parameters:
        setattr(replica, name, parameters[index])
        if not (leaves or node.kind.is_script):  # no leaf can be registered by assignment
            replica._parameters[name] = replica.__dict__.pop(name)
    for name, index in node.buffers:
        setattr(replica, name, buffers[index])
    for name in node.absent:
        replica._parameters[name] = None
