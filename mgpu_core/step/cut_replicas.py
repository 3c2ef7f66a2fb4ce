"""The leaf Parameters of all ranks whose values are in shards: views of memory that is there at times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch.nn import Module

from mgpu_core.devices.absent_memory import cells_of
from mgpu_core.devices.tensor_checks import moved_between
from mgpu_core.devices.transfer import to_device
from mgpu_core.optim.flat_buffers import warn_of_holders
from mgpu_core.ranks.team import Team
from mgpu_core.step.replicas import Replicas
from mgpu_core.step.rollback import uninterrupted
from mgpu_core.step.shards import Shards
from mgpu_core.trees.module_copy import leaf_like
from mgpu_core.trees.module_tree import ModuleTree
from mgpu_core.trees.moves import give_memory

__all__ = ["CutReplicas"]

_kind_of = attrgetter("shape", "dtype")


class CutReplicas(Replicas):
    """The parameters of each rank, which the devices keep in parts.

    Args:
        net: the user's module; its parameters may lie on any devices, and keep their identity.
        team: the ranks.
        shards: takes the values.

    Attributes:
        host: where the whole module has room: the CPU; or the first device, where torch cannot exchange the memory of
            parameters of such devices for that of the CPU.

    Raises:
        ValueError: as :class:`Replicas`.
    """

    _look = staticmethod(cells_of)

    def __init__(self, net: Module, team: Team, shards: Shards) -> None:
        self._shards, self._is_over = shards, False
        super().__init__(net, team)
        host, first = torch.empty(0, device="cpu"), team.devices[0]
        fits = torch._has_compatible_shallow_copy_type(torch.empty(0, device=first), host)
        self.host = host.device if fits else first
        shards.leaves = self.leaves

    def _add_rows(self) -> None:
        cut, first = self._shards.cut, self.team.devices[0]
        self.copied = [i for i in range(len(self.own)) if i not in cut]
        there = [i for i, parameter in enumerate(self.own) if i in cut and not parameter.is_meta]
        warn_of_holders([self.own[i] for i in there], [self.names[i] for i in there])
        for i, parameter in enumerate(self.own):
            if i not in cut:
                parameter.data = to_device(parameter.detach(), first)
                continue
            if parameter.is_meta:
                self._shards.unset.add(i)
            else:
                self._shards.put(i, parameter.detach())
            give_memory(parameter, self._shards.absent[i])
        for device in self.team.devices[1:]:
            values = [self._value(i, device) for i in range(len(self.own))]
            self.parameters.append([leaf_like(*pair) for pair in zip(self.own, values, strict=True)])

    def _value(self, i: int, device: torch.device) -> torch.Tensor:
        """Return the value of a parameter for the ranks of a device."""
        return self._shards.view(i, device) if i in self._shards.cut else to_device(self.own[i].detach(), device)

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """Return nothing: the shards hold the memory."""
        return ()

    def are_those_of(self, tree: ModuleTree) -> bool:
        """Return whether the module still has these parameters, and none of them was thawed."""
        kinds, before = list(map(_kind_of, self.own)), [kind[:2] for kind in self._kinds]
        if list(map(id, tree.parameters)) != self._ids or kinds != before:
            return False
        return not any(self.own[i].requires_grad for i in self._shards.frozen[0].value_views)

    def _is_alike(self, i: int) -> bool:
        """Return whether a parameter has the shape and dtype that it had; on which device does not matter."""
        return bool(_kind_of(self.own[i]) == self._kinds[i][:2])

    @torch.no_grad()
    def _take_back(self, i: int) -> None:
        """Take over the value of a parameter that was given other memory."""
        if i not in self._shards.cut:
            super()._take_back(i)
            return
        absent = self._shards.absent[i]
        if cells_of([self.own[i]]) != cells_of([absent]):
            self._shards.put(i, self.own[i].detach())
        self.own[i].data = absent
        for rank, device in enumerate(self.team.devices[1:], start=1):
            self.parameters[rank][i].data = self._shards.view(i, device)

    def check_unwritten(self, before: list[int]) -> None:
        """Do nothing: the shards look at all ranks."""

    def settle(self) -> bool:
        return not self._is_over and super().settle()

    def _set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        i = next((i for i in self._shards.cut if self.own[i] is tensor), None)
        if i is not None:
            self._shards.put(i, value)
        else:
            super()._set(tensor, value)

    def release(self, *, on_host: bool = False) -> None:
        """Make the user's module whole for good, on the first device, or on the host."""
        self._shards.end()
        self.settle()
        self._make_whole(self.host if on_host else None)
        self._is_over = True

    def _make_whole(self, device: torch.device | None, *, sets_all: bool = False) -> None:
        if device is not None and device.type == "cpu" and self.host != device:
            raise ValueError(f"torch cannot let parameters on {self.team.devices[0]} be on {device}: leave device out")
        for i in sorted(self._shards.cut - (frozenset() if sets_all else self._shards.unset)):
            self.own[i].data = self._shards.whole(i, device or self.team.devices[0])

    @contextmanager
    def full(self, device: torch.device | None, *, sets_all: bool = False) -> Iterator[None]:
        """Let the user's module be whole inside; values that are changed there count.

        Args:
            device: where; ``None``: on the first.
            sets_all: also parameters that have no values yet, which get some inside.
        """
        absent = self._shards.absent
        cells = cells_of([self.own[i] for i in absent]), cells_of([*absent.values()])
        if len(moved_between(*cells)) == len(absent) > 0:  # it is whole already
            yield
            return
        try:
            self.settle()
            self._make_whole(device, sets_all=sets_all)
            yield
        finally:
            with uninterrupted():
                self.settle()
