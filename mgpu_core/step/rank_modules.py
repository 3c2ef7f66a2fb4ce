"""The module of each rank, made for each call from the user's module as it is then."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.nn import Module, Parameter

from mgpu_core.comm import dispatch
from mgpu_core.devices.transfer import module_to
from mgpu_core.parallel.replicate_modules import compiled_by_rank, plain_copies
from mgpu_core.ranks.team import Team
from mgpu_core.trace.tracer import span
from mgpu_core.trees.module_tree import ModuleTree, tensors_of
from mgpu_core.trees.replica_parameters import follow_attributes
from mgpu_core.trees.views import build_replica

__all__ = ["RankModules", "replicas_of_loss"]


class RankModules:
    """The replicas of a module for a team.

    Rank 0 runs the user's own module, so its assignments persist; those of other ranks are lost, as in the drop-in.
    Where the module is static or compiled, rank 0 runs a replica, too.
    Its buffers are copied to the other ranks before each call.

    Args:
        module: the user's: the net, or a loss function with tensors.
        team: the ranks.
        leaves: ``leaves[rank][i]``, the Parameters of each rank in the module tree's order; ``None``: the parameters
            are copied like buffers.
        static: make the replicas once: of later changes of the module only modes and values are followed.

    Attributes:
        tree: the module, as the last :meth:`read` found it.
        is_static: the replicas live on.
    """

    def __init__(
        self, module: Module, team: Team, leaves: Sequence[Sequence[Parameter]] | None, *, static: bool
    ) -> None:
        self.module, self._team, self._leaves, self.is_static = module, team, leaves, static
        self.tree = ModuleTree(module)
        self._static: tuple[list[Module], list[list[torch.Tensor]]] | None = None
        self._modes: list[bool] = []  # of a static module's replicas
        if len(team) > 1 and self.tree.is_compiled:
            compiled_by_rank(self.tree, len(team))  # refuses what it cannot repeat

    @property
    def kept(self) -> list[Module]:
        """The modules that live longer than a call: the user's own, and static replicas."""
        return [self.module] if self._static is None else self._static[0]

    def read(self) -> None:
        """Read the module as it is now; a static one as it was, with the modes and values of now."""
        if not self.is_static:
            self.tree = ModuleTree(self.module)
        elif self._static is not None:
            self._refresh(*self._static)
        elif len(self._team) > 1:
            nodes, copies = self._made(len(self._team))
            self._static = list(map(itemgetter(0), nodes)), copies

    def of_ranks(self, count: int) -> list[Module]:
        """Return the modules of the first ``count`` ranks, for one call, after a :meth:`read`."""
        if self._static is not None:
            return self._static[0][:count]
        return [self.module] if count == 1 else list(map(itemgetter(0), self._made(count)[0]))

    def nodes_of_ranks(self, count: int) -> list[list[Module]]:
        """Return the same, each with all modules below it, by the tree's nodes."""
        return [[node.module for node in self.tree.nodes]] if count == 1 else self._made(count)[0]

    def _made(self, count: int) -> tuple[list[list[Module]], list[list[torch.Tensor]]]:
        tree, leaves = self.tree, self._leaves
        tensors = tree.tensors if leaves is None else tree.buffers
        if tensors:
            with span("replicate"):
                copies = plain_copies(tensors, self._team.first(count))
                follow_attributes(tensors, copies)
        else:
            copies = [[]] * count
        if leaves is None:
            rows: list[tuple[Sequence[Any], list[torch.Tensor]]] = [
                (row[: len(tree.parameters)], row[len(tree.parameters) :]) for row in copies
            ]
        else:
            rows = list(zip(leaves, copies, strict=False))
        # The ranks of a compiled module must take turns at the compiler, so rank 0 runs a replica, too.  So it does
        # where replicas live on: all ranks run the module as it was then, and none the one of now.
        calls = compiled_by_rank(tree, count) if tree.is_compiled else [[]] * count
        nodes = [] if tree.is_compiled or self.is_static else [[node.module for node in tree.nodes]]
        for rank in range(len(nodes), count):
            nodes += (build_replica(tree, *rows[rank], calls[rank]),)
        return nodes, copies

    def _refresh(self, replicas: Sequence[Module], copies: Sequence[Sequence[torch.Tensor]]) -> None:
        tensors = self.tree.tensors if self._leaves is None else self.tree.buffers
        if tensors:
            with span("replicate"), torch.no_grad():
                dispatch.broadcast_into(tensors, list(zip(*copies, strict=True)))
                follow_attributes(tensors, copies)
        modes = [node.module.training for node in self.tree.nodes]
        if modes != self._modes:
            self._modes = modes
            for replica in replicas:
                for node, mode in zip(ModuleTree(replica).nodes, modes, strict=True):
                    node.module.training = mode


def replicas_of_loss(loss_fn: Any, team: Team, *, static: bool) -> Any:
    """Return the replicas of a loss module with tensors (class weights, a running centre); anything else as it is.

    A module on another device than the first is moved there, as ``Module.to`` does.
    """
    tensors = tensors_of(loss_fn) if isinstance(loss_fn, Module) else []
    if not tensors:
        return loss_fn
    if any(tensor.device != team.devices[0] for tensor in tensors):
        module_to(loss_fn, team.devices[0])
    return RankModules(loss_fn, team, None, static=static)
