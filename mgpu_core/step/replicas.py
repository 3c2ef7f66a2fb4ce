"""The leaf Parameters of all ranks, which live on from step to step.

Rank 0's are the user's own.  Ranks of one device share the memory of the values, never the leaf: each has its own
gradients.  The modules around them are made anew for each call (see ``rank_modules.py``), so nothing about a module has
to be noticed; only the memory of its parameters is compared, once per call and before an update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, not_
from typing import Any

import torch
from torch.nn import Module, Parameter

from mgpu_core.comm import dispatch
from mgpu_core.devices.tensor_checks import memory_of, moved_between
from mgpu_core.devices.transfer import to_device
from mgpu_core.optim.flat_buffers import FlatTensors, compact, holders, warn_of_holders
from mgpu_core.ranks.team import Team
from mgpu_core.step.rollback import uninterrupted
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trees.module_copy import give_attributes, leaf_like
from mgpu_core.trees.module_tree import ModuleTree, check_initialised, named_parameters_of
from mgpu_core.trees.weights import Rename, Weights

__all__ = ["GradientHook", "Replicas", "refuse_hooks"]

ADVICE = "call step.rebuild(), or make a new step"

_version_of, _requires_grad_of = attrgetter("_version"), attrgetter("requires_grad")
_kind_of, _attributes_of = attrgetter("shape", "dtype", "device"), attrgetter("__dict__")


class Replicas:
    """The parameters of each rank.

    Args:
        net: the user's module, on the first device.
        team: the ranks.

    Attributes:
        names: of the parameters, in the order in which torch finds them.
        parameters: ``parameters[rank][i]``; row 0 holds the user's own.
        own: that row.
        leaves: those of all rows, one after the other.
        devices: each device of the team once, in the order of ranks.
        ranks_of: per device its ranks.
        is_mixed: whether there are devices of several kinds.
        frozen: per parameter whether it does not require grad.
        moves: how often parameters that the step does not update were found in other memory.
        have_left: views of values lie elsewhere than in their buckets, as after ``share_memory()``: all is to be laid
            out anew.
        copied: the parameters that each device has a copy of.
        renewals: how often buckets got other memory, because somebody else held their memory.

    Raises:
        ValueError: a parameter that has not been initialised, or has a post-accumulate hook.
    """

    _look = staticmethod(memory_of)  # equal answers, as long as no parameter was given other memory

    host: torch.device | None = None  # where the whole module has room

    def __init__(self, net: Module, team: Team) -> None:
        self.net, self.team = net, team
        tree = ModuleTree(net)
        check_initialised(tree.tensors)
        refuse_hooks(net)
        names = {id(parameter): name for name, parameter in named_parameters_of(net)}
        self.own = params = tree.parameters
        self._ids = list(map(id, params))
        self.names = [names[each] for each in self._ids]
        self.devices = list(dict.fromkeys(team.devices))
        self.is_mixed = len({device.type for device in self.devices}) > 1
        self.ranks_of = [[rank for rank in team.ranks if team.devices[rank] == device] for device in self.devices]
        self.copied: Sequence[int] = range(len(params))
        self.parameters: list[list[Parameter]] = [params]
        self._add_rows()
        self.frozen: list[bool] = []
        self.moves = self.renewals = 0
        self.have_left = False
        self._adopted: frozenset[int] = frozenset()  # parameters whose memory is the step's
        self._flats: dict[int, FlatTensors] = {}  # of each device, that memory
        self._ends: dict[int, Any] = {}  # on the first device, where the parameters lie in it
        self.leaves = [parameter for row in self.parameters for parameter in row]
        self._memory = self._look(self.leaves)
        holders.add(self)
        self._kinds = list(map(_kind_of, params))

    def _add_rows(self) -> None:
        """Make the parameters of the ranks after the first."""
        for rank, device in enumerate(self.team.devices[1:], start=1):
            first = self.team.devices.index(device)
            values = self.parameters[first if first < rank else 0]
            pairs = zip(self.own, values, strict=True)
            self.parameters.append([leaf_like(each, to_device(value.detach(), device)) for each, value in pairs])

    def _is_alike(self, i: int) -> bool:
        """Return whether a parameter has the shape, dtype and device that it had."""
        return bool(_kind_of(self.own[i]) == self._kinds[i])

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """Return the parameters of all ranks."""
        return self.leaves

    def are_those_of(self, tree: ModuleTree) -> bool:
        """Return whether the module still has these parameters, each of the shape, dtype and device that it had."""
        if list(map(id, tree.parameters)) != self._ids:
            return False
        return self._kinds == list(map(_kind_of, self.parameters[0]))

    def follow(self) -> bool:
        """Bring all ranks' parameters up to the user's; return whether others are frozen now.

        Raises:
            RuntimeError: see :meth:`settle`.
        """
        self.settle()
        first, *rows = self.parameters
        if any(map(_attributes_of, self.leaves)):
            for row in rows:
                give_attributes(first, row)
        for row in rows:
            for parameter, leaf in zip(first, row, strict=True):
                if leaf.requires_grad != parameter.requires_grad:
                    leaf.requires_grad = parameter.requires_grad
        before, self.frozen = self.frozen, list(map(not_, map(_requires_grad_of, first)))
        return before != self.frozen

    def settle(self) -> bool:
        """Put parameters that somebody gave other memory (``.data =``, another step) back into the memory of this step.

        Rank 0's values count, as in the drop-in; assignments of other ranks are lost.

        Returns:
            Whether there were any.

        Raises:
            RuntimeError: a parameter has another shape, dtype or device.
        """
        now = self._look(self.leaves)
        if now == self._memory:
            return False
        moved = sorted({i % len(self._kinds) for i in moved_between(now, self._memory)})
        for i in moved:
            if not self._is_alike(i):
                raise RuntimeError(f"parameter {self.names[i]} was given another shape, dtype or device: {ADVICE}")
        self._leave_to_others(moved)
        for i in moved:
            self._take_back(i)
        self.send_values(moved)
        self.moves += not self._adopted.issuperset(moved)
        self._memory = self._look(self.leaves)
        return True

    @torch.no_grad()
    def _leave_to_others(self, moved: Sequence[int]) -> None:
        """Give buckets other memory where somebody keeps the memory of their parameters, to swap it in again, say."""
        self.have_left |= any(self._has_left(i) for i in moved if i in self._adopted)
        held = [i for i in moved if i in self._adopted and self._is_held(i)]
        if not held or self.have_left:
            return
        self.renewals += 1
        views = self._flats[0].value_views
        for i in set(self._flats[0].renew(held)).difference(moved):  # those that have moved are taken back next
            for rank in self.ranks_of[0]:
                self.parameters[rank][i].data = views[i]
        self._ends = {i: memory_of([view]) for i, view in views.items()}

    def _has_left(self, i: int) -> bool:
        """Return whether the view of a parameter's values lies elsewhere than in its bucket."""
        return bool(memory_of([self._flats[0].value_views[i]]) != self._ends[i])

    def _is_held(self, i: int) -> bool:
        """Return whether others than the ranks of the first device hold the memory of a parameter."""
        flat = self._flats[0]
        here = memory_of([flat.value_views[i]])
        rows = [self.parameters[rank][i] for rank in self.ranks_of[0]]
        return flat.count_holders(i) > 1 + sum(memory_of([each]) == here for each in rows)

    @torch.no_grad()
    def _take_back(self, i: int) -> None:
        parameter = self.own[i]
        if i in self._adopted and memory_of([parameter]) != memory_of([self._flats[0].value_views[i]]):
            self._flats[0].value_views[i].copy_(parameter)
        for device, ranks in enumerate(self.ranks_of):
            first = self.parameters[ranks[0]][i].data
            values = self._flats[device].value_views[i] if i in self._adopted else first
            for rank in ranks:
                self.parameters[rank][i].data = values

    @property
    def versions(self) -> list[int]:
        """How often each parameter of the user's module was written in place, as torch counts."""
        return list(map(_version_of, self.own))

    def check_unwritten(self, before: list[int]) -> None:
        """Raise RuntimeError if the forward of rank 0 has written a parameter that other ranks share.

        Each of them would have written it at the same time, and read another's value.

        Args:
            before: ``versions`` before the forwards.
        """
        now = list(map(_version_of, self.own))
        if now != before and len(self.ranks_of[0]) > 1:
            name = next(name for name, one, other in zip(self.names, now, before, strict=True) if one != other)
            raise RuntimeError(
                f"the forward of rank 0 writes parameter {name} in place (a moving average, "
                "Embedding(max_norm=...)?): ranks of one device share its memory, so it was written once per rank. "
                "Write it between steps, or give each rank a device of its own, or use mgpu_core.DataParallel"
            )

    def send_values(self, indices: Sequence[int] | None = None) -> None:
        """Copy the values of the user's module to the other devices: all parameters, or those with these indices."""
        leaders = [ranks[0] for ranks in self.ranks_of[1:]]
        wanted = self.copied if indices is None else [i for i in indices if i in self.copied]
        if leaders and wanted:
            sources = [self.own[i].detach() for i in wanted]
            copies = [[self.parameters[rank][i].detach() for rank in leaders] for i in wanted]
            dispatch.broadcast_into(sources, copies)

    def adopt(self, flats: Sequence[FlatTensors], indices: Collection[int]) -> None:
        """Make the flat values of each device the memory of these parameters; others get memory of their own back."""
        self._let_go_of_all_but(indices)
        new = sorted(indices) if self.have_left else sorted(set(indices) - self._adopted)
        self.have_left = False
        warn_of_holders([self.own[i] for i in new], [self.names[i] for i in new])
        for ranks, values in zip(self.ranks_of, flats, strict=True):
            values.adopt(self.parameters[ranks[0]], indices)
            for rank in ranks[1:]:
                values.show_to(self.parameters[rank], indices)
        self._adopted, self._flats = frozenset(indices), dict(enumerate(flats))
        self._ends = {i: memory_of([view]) for i, view in flats[0].value_views.items()}
        self._memory = self._look(self.leaves)

    def _let_go_of_all_but(self, indices: Collection[int]) -> None:
        for i in self._adopted.difference(indices):  # they have left the optimizer
            for ranks in self.ranks_of:
                values = compact(self.parameters[ranks[0]][i])
                for rank in ranks:
                    self.parameters[rank][i].data = values

    @torch.no_grad()
    def load(self, source: Any, rename: Rename | None) -> None:
        """Give the user's module the values of files; the next step sends them to the other devices."""
        files = Weights(self.net, source, rename)
        with uninterrupted():
            for tensor, value in files.values():
                self._set(tensor, value)

    def _set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        tensor.copy_(value)

    def full(
        self,
        device: torch.device | None,
        *,
        sets_all: bool = False,
    ) -> AbstractContextManager[object]:
        """Let the user's module be whole inside, on this device, or on the first: here it always is."""
        return NULL_CONTEXT

    def release(self, *, on_host: bool = False) -> None:
        """Give the user's module storage of its own again; what has no memory, on the first device, or on the host."""
        for i in self._adopted:
            self.own[i].data = compact(self.own[i])
        self._adopted = frozenset()
        self._flats.clear()


def refuse_hooks(net: Module) -> None:
    """Raise ValueError at a parameter with a post-accumulate hook that is not a step's."""
    for name, parameter in named_parameters_of(net):
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if any(type(hook) is not GradientHook for hook in hooks.values()):
            raise ValueError(
                f"parameter {name} has a post-accumulate hook, which would see the gradient of one rank alone; "
                "remove it before the module is given to TrainStep"
            )


class GradientHook:
    """The hook that a step puts on the parameters of a rank; known by its class."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, _: torch.Tensor) -> None:
        self._call()
