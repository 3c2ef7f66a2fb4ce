"""Find forwards of replicas that compute with the module's own parameters: by closures, weak references, helpers.

Lists, dicts, partials and methods are made again for replicas (``layer_holders``).  What cannot be looked into is found
by the graph that the first forwards leave: that of a rank above 0 ends in copies, and in no parameter of the module::

    outputs of rank 1 ── ... ── copies of rank 1 ── broadcast ── the module's parameters     as it should be
                          └─── a parameter of the module                                     found
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.parallel.first_calls.calls import Call, Observer
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.nested import tensors_in
from mgpu_core.trees.replica_hooks import hook_that_reaches

__all__ = ["Originals"]

_COPIES = "_BroadcastBackward"  # autograd's node of the broadcast that has made the ranks' copies


class Originals(Observer):
    """Warns of a rank above 0 that uses a parameter of the module itself, and of a hook that reaches the module."""

    def begin(self, call: Call) -> None:
        tree = call.tree
        if isinstance(call.called[-1], Module):
            _look_at_hooks(call, tree.indices.keys())
        # Where ranks meet, the graph of each goes on in those of the others: nothing can be told from it.
        originals = frozenset() if tree.ranks_meet else frozenset(map(id, tree.parameters))
        used = call.kept[self] = set()
        # Rank 0 may have parameters of the module itself.
        call.called = [*call.called[:1], *(partial(_watched, each, originals, used) for each in call.called[1:])]

    def end(self, call: Call) -> bool:
        used = call.kept[self]
        if used:
            name = next(name for name, each in Module.named_parameters(call.module) if id(each) in used)
            warn_user(
                f"a replica of {type(call.module).__name__} computes with {name} of the module itself: a closure, a "
                "weak reference or a helper object holds the module or one of its layers. Ranks share that layer, so "
                "its buffers are written once per rank, and on several devices the operation fails. Reach layers by "
                "attributes of the module (lists, dicts, partials and bound methods of layers are made again for each "
                "replica)"
            )
        return bool(used)


def _look_at_hooks(call: Call, modules: Collection[int]) -> None:
    name = hook_that_reaches(call.called[-1], modules)
    if name is not None:
        warn_user(
            f"a hook on {name} of {type(call.module).__name__} reaches the module itself, by an object or a container: "
            "with several ranks it reads and writes that one's attributes, and the forward of each rank its own. Make "
            "it a method of the module, or a function that names the module: those are each rank's"
        )


def _watched(called: Callable[..., Any], originals: Collection[int], used: set[int], *args: Any, **kwargs: Any) -> Any:
    """Call a replica, and note which parameters of the module itself it has used."""
    outputs = called(*args, **kwargs)
    used.update({id(each) for each in _parameters_between((args, kwargs), outputs)}.intersection(originals))
    return outputs


def _parameters_between(inputs: Any, outputs: Any) -> list[torch.Tensor]:
    """Return the leaves of the outputs' graph, up to the inputs and the copies of parameters."""
    leaves: list[torch.Tensor] = []
    waiting: list[Any] = [each.grad_fn for each in tensors_in(outputs)]
    seen: set[Any] = {None, *(each.grad_fn for each in tensors_in(inputs))}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves.append(leaf)
            elif type(node).__name__ != _COPIES:
                waiting += [each for each, _ in node.next_functions]
    return leaves
