"""The ranks' views of the module that a TensorParallel was given: made in each call, of the module as it is then.

A view has its rank's parts of the Parameters that are cut and copies of all else, attributes that say how large a part
is, and forwards that meet those of the other ranks.  Values that the forward assigns stay: the module has rank 0's, and
each of the other ranks finds its own again in the next call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from mgpu_core.comm.autograd import broadcast_buckets
from mgpu_core.parallel.replicate_modules import compiled_by_rank, plain_copies
from mgpu_core.ranks.team import Team
from mgpu_core.tensor_parallel.given import empty, refuse_calls
from mgpu_core.tensor_parallel.meetings import CutForward, CutLayer
from mgpu_core.tensor_parallel.objects import Objects
from mgpu_core.tensor_parallel.plan import ShardPlan
from mgpu_core.trees.layer_holders import rewired
from mgpu_core.trees.module_tree import ModuleTree
from mgpu_core.trees.views import REWIRED, StandIns, build_replica, loosen

__all__ = ["RankViews"]


class RankViews:
    """Makes the ranks' views of a module.

    Args:
        net: the module.
        team: the ranks.
        plan: how it is cut.
        parts: of each Parameter, by its id: one per rank, or the only one on the first device.

    Attributes:
        tree: the module as the last call has found it.
        objects: of which each rank has its own.

    Raises:
        TypeError: an attribute that cannot be copied for each rank.
    """

    def __init__(self, net: Module, team: Team, plan: ShardPlan, parts: Mapping[int, Sequence[Parameter]]) -> None:
        self._net, self._team, self._parts = net, team, parts
        layers = _cut_layers(net, plan, parts, len(team)) if len(team) > 1 else {}
        self._meeting = {key: layer for key, layer in layers.items() if layer.meets}
        self._sizes = [_sizes_of(rank, net, plan, layers, len(team)) for rank in team.ranks]
        self._own_forward = net.__dict__.get("forward")  # where it is not that of the class
        self.tree = ModuleTree(net)
        self.objects = Objects(team.devices, set(map(id, self.tree.tensors)))
        self.objects.give_attributes(self.tree, ())
        self.objects.given.clear()

    def empty(self, buffers: Mapping[int, torch.Tensor]) -> None:
        """Empty the module, which gets other buffers: these, by the ids of its own."""
        for module in self.tree.modules:
            if isinstance(module, torch.nn.TransformerEncoderLayer):
                module.register_forward_hook(lambda *_: None)  # without one it may read its layers' weights itself
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffers[id(buffer)]
        empty(self._net, self._parts)
        self._read()

    def _read(self) -> None:
        """Read the module as it is now.

        Raises:
            RuntimeError: it has other Parameters, or other cut layers, than it was cut with.
        """
        self.tree = tree = ModuleTree(self._net)
        planned = {key for key, _ in self._sizes[0]}
        if self._parts.keys() != set(map(id, tree.parameters)) or not planned <= tree.indices.keys():
            raise RuntimeError("Parameters were added or taken away: change the module before it is cut")
        parts = [self._parts[id(parameter)] for parameter in tree.parameters]
        self._whole = [(index, of_ranks[0]) for index, of_ranks in enumerate(parts) if len(of_ranks) == 1]
        self._of_ranks = [[of_ranks[min(rank, len(of_ranks) - 1)] for of_ranks in parts] for rank in self._team.ranks]

    def of_call(self) -> tuple[list[list[Module]], StandIns]:
        """Return the views of the module as it is now: per rank those of the tree's modules, the net's first; rank 0's.

        The gradients of the copies are summed in the order of the ranks.
        """
        if not self.tree.is_current():
            self._read()
        tree, ranks = self.tree, len(self._team)
        whole = [parameter for _, parameter in self._whole]
        rows = broadcast_buckets(self._team.devices, whole, numbered=False)
        buffers = [None, *(plain_copies(tree.buffers, self._team)[1:] if tree.buffers else [[]] * (ranks - 1))]
        compiled = compiled_by_rank(tree, ranks) if tree.is_compiled else [[]] * ranks
        modules: list[list[Module]] = []
        for rank, (row, below, calls) in enumerate(zip(rows, buffers, compiled, strict=True)):
            parameters: list[torch.Tensor] = [*self._of_ranks[rank]]
            for (index, _), tensor in zip(self._whole, row, strict=True):
                parameters[index] = tensor
            modules += (build_replica(tree, parameters, below, calls),)
            self._finish(rank, modules[rank])
        if ranks > 1:
            self.objects.give_attributes(tree, modules)
        return modules, StandIns(zip(tree.modules, modules[0], strict=True))

    def _finish(self, rank: int, modules: Sequence[Module]) -> None:
        """Give a rank's views forwards of their own, and the sizes of its parts."""
        tree = self.tree
        self.give_forward(modules)
        for key, sizes in self._sizes[rank]:
            state = modules[tree.indices[key]].__dict__
            state |= sizes
        for key, layer in self._meeting.items():
            view = modules[tree.indices[key]]
            view.__dict__["forward"] = layer.forward_of(view, rank)

    def give_forward(self, modules: Sequence[Module]) -> None:
        """Give a view or a copy of the module the forward that the module had.

        Args:
            modules: it and all below, in the order of the tree.
        """
        if modules[0].__dict__.get("forward") is refuse_calls:
            del modules[0].__dict__["forward"]
            if self._own_forward is not None:
                others: dict[int, Any] = {key: modules[index] for key, index in self.tree.indices.items()}
                modules[0].__dict__["forward"] = rewired(self._own_forward, others)

    def keep(self, views: Sequence[Sequence[Module]], of_first: StandIns) -> None:
        """Keep the values that the forward has assigned: rank 0's in the module, the others' for the next call."""
        if not of_first.are_as_before:
            assigned = of_first.assigned()
            of_first.keep(lambda _, before, now: type(before) is not CutForward)
            self.objects.follow(self.tree, views, assigned)
        if REWIRED in views[-1][0].__dict__:
            loosen([row[0] for row in views])
        for row in views if self._own_forward is not None else ():
            row[0].__dict__.pop("forward", None)  # which holds the view that holds it


def _cut_layers(
    net: Module, plan: ShardPlan, parts: Mapping[int, Sequence[Parameter]], ranks: int
) -> dict[int, CutLayer]:
    """Return the planned layers by the ids of the modules."""
    layers: dict[int, CutLayer] = {}
    for name, word in plan.layers.items():
        layer: Any = net.get_submodule(name)
        dim = 1 if word in ("row", "rowwise_split_input") else 0
        is_module = word == "moe_tp_experts"
        counts = [0] * ranks if is_module else [part.shape[dim] for part in parts[id(layer.weight)]]
        layers[id(layer)] = CutLayer(name, word, counts, layer)
    return layers


def _sizes_of(
    rank: int, net: Module, plan: ShardPlan, layers: Mapping[int, CutLayer], ranks: int
) -> list[tuple[int, dict[str, Any]]]:
    """Return the attributes that are those of a rank's part, with the ids of the modules."""
    sizes = [(key, layer.attributes[rank]) for key, layer in layers.items()]
    for name, heads in plan.heads.items():
        sizes.append((id(net.get_submodule(name)), {key: count // ranks for key, count in heads.items()}))
    return sizes
