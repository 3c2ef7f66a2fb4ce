"""Replicate: one copy of the module per rank, whose parameters are differentiable copies of the original's.

Nothing is remembered between two forwards but plans: a replica is made from the module as it is now, with all that the
user has changed.  Making replicas is pure Python, in every forward, so it is written for speed: the module tree
is walked once, not once per rank, and ordinary modules are copied by their dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from mgpu_core.trees.module_tree import ModuleTree, check_initialised
from mgpu_core.trees.replica_parameters import follow_attributes
from mgpu_core.trees.views import build_replicas

__all__ = ["compiled_by_rank", "plain_copies", "replicate", "replicate_tree"]

M = TypeVar("M", bound=Module)


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
        return build_replicas(tree, [(row[:split], row[split:]) for row in copies], calls)


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
    compiled = [
        (index, compiled_calls(node.module, node.compiled, ranks))
        for index, node in enumerate(tree.nodes)
        if node.compiled is not None
    ]
    return [[(index, calls[rank]) for index, calls in compiled] for rank in range(ranks)]
