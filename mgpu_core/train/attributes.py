"""Attributes that the user changes between two steps: a temperature, a rate of dropout, an entry of a configuration.

Each rank's copy of the module has attributes of its own.  What a forward changes in its own module (a count, a hidden
state, what it keeps for others to read) stays there.  What is found changed before a step, the user has changed: on one
device it would count from now on, so all ranks get it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.caller import warn_caller
from mgpu_core.look import Look
from mgpu_core.train.inside import PLAIN, Inside, copies_its_own_way, own_attributes
from mgpu_core.train.net_watch import ADVICE

__all__ = ["AttributeWatch"]

_Name = tuple[int, str]  # of a module, by its place, and an attribute


class AttributeWatch:
    """The attributes of the user's module, and of all modules in it.

    Args:
        own: the user's, in one order.
        copies: of each other rank those in the same places.
        home: the device of the user's.
        devices: of each of these ranks its own.

    Attributes:
        changes: how often the user has changed some.
    """

    def __init__(
        self,
        own: Sequence[Module],
        copies: Sequence[Sequence[Module]],
        home: torch.device,
        devices: Sequence[torch.device],
    ) -> None:
        self._copies, self._home, self._devices = copies, home, devices
        self.changes = 0
        self._places = [_Place(module) for module in own]
        self._last: set[_Name] = set()  # what the last step's forwards have changed themselves
        self._forwards: set[_Name] = set()  # what they change again and again
        self._told: set[_Name] = set()  # what cannot be copied
        self._is_in_step = False
        self._look: Look | None = None  # at all places, where none was let go
        self._taken()

    def follow(self) -> None:
        """Before a step: gives all ranks what has been changed since :meth:`leave`.

        Raises:
            RuntimeError: a module has other modules in it.
        """
        if self._look is None or self._look.is_over():
            self._give_to_all()
        self._is_in_step = True

    def let_go(self) -> None:
        """Before forwards: what they replace must not live longer because somebody has looked at it."""
        for i in {i for i, _ in self._forwards}:
            self._places[i].forget()
            self._look = None

    def leave(self) -> None:
        """After all that a step does, if it came so far: what has changed meanwhile, forwards have changed."""
        if self._is_in_step and (self._look is None or self._look.is_over()):
            before, self._last = self._last, set(self._taken())
            self._forwards |= before & self._last
        self._is_in_step = False

    def _give_to_all(self) -> None:
        self._look = None  # until all ranks have it: Ctrl-C may come before
        for place in self._places:
            place.check_children()
        changed = [(i, name) for i, place in enumerate(self._places) for name in place.changed()]
        for row, device in zip(self._copies, self._devices, strict=True):
            self._mirror(changed, row, device)
        self.changes += bool(changed)
        self._taken()

    def _taken(self) -> list[_Name]:
        """Takes what is there now for what must be found; says what of it has changed."""
        changed = [(i, name) for i, place in enumerate(self._places) for name in place.taken()]
        looks = [place.look for place in self._places if place.look is not None]
        containers = {id(each): each for look in looks for each in look.containers}  # many modules may share one
        self._look = Look(containers.values(), [each for look in looks for each in look.attributes])
        return changed

    def counted(self) -> str | None:
        """A number that forwards change again and again, in words; ``None`` where there is none."""
        for i, name in sorted(self._forwards):
            module = self._places[i].module
            if isinstance(vars(module).get(name), int | float):
                return f"attribute {name} of {type(module).__name__}"
        return None

    def _mirror(self, names: Sequence[_Name], row: Sequence[Module], device: torch.device) -> None:
        memo: dict[int, Any] = {}
        for i, name in names:
            own, twin = vars(self._places[i].module), vars(row[i])
            if name not in own:
                twin.pop(name, None)
            elif type(own[name]) in PLAIN:
                twin[name] = own[name]
            else:
                memo = memo or self._memo(row, set(names))
                try:
                    inside = Inside(own[name])
                    if not inside.is_data:
                        raise TypeError(f"{type(own[name]).__name__} holds more than data")
                    inside.prepare_copy(memo, self._home, device)
                    twin[name] = copy.deepcopy(own[name], memo)
                except Exception as error:
                    self._tell(i, name, error)

    def _tell(self, i: int, name: str, error: Exception) -> None:
        """Once; and not where the module's class knows itself what its copies have, as a LightningModule does."""
        module = self._places[i].module
        if (i, name) not in self._told and not copies_its_own_way(module, Module):
            self._told.add((i, name))
            warn_caller(
                f"attribute {name} of {type(module).__name__} was changed, and cannot be copied for the other ranks "
                f"({type(error).__name__}: {error}): they keep what they have"
            )

    def _memo(self, row: Sequence[Module], changed: set[_Name]) -> dict[int, Any]:
        """What this rank has in the places of the user's modules, tensors, and attributes that have not changed."""
        memo: dict[int, Any] = {}
        for i, (place, twin) in enumerate(zip(self._places, row, strict=True)):
            own, theirs = place.module, vars(twin)
            kept = [(name, each) for name, each in own_attributes(own) if name in theirs and (i, name) not in changed]
            memo |= {id(each): theirs[name] for name, each in kept}
            memo[id(own)] = twin
            for mine, found in ((own._parameters, twin._parameters), (own._buffers, twin._buffers)):
                memo |= {id(each): found[name] for name, each in mine.items() if found.get(name) is not None}
        return memo


class _Place:
    """The attributes of one module, as they were left."""

    __slots__ = ("_children", "_left", "look", "module")

    def __init__(self, module: Module) -> None:
        self.module = module
        self.forget()

    def forget(self) -> None:
        """Holds nothing, and so finds nothing changed."""
        self._left: dict[str, tuple[Any, Look | None]] = {}
        self._children: list[Module | None] = []
        self.look: Look | None = None

    def taken(self) -> list[str]:
        """Takes what is there now for what must be found; says what of it has changed."""
        if self.look is not None and not self.look.is_over():
            return []
        changed = self.changed()
        if self.look is not None and not changed and self._has_its_children():
            self.look.take_again()  # over by what the module is made of, its mode, say
        else:
            self._take()
        return changed

    def _take(self) -> None:
        self._left = {
            name: (value, (None if type(value) in PLAIN else Inside(value).look()))
            for name, value in own_attributes(self.module)
        }
        self._children = list(self.module._modules.values())
        children = [self.module._modules] if isinstance(self.module._modules, dict) else []  # those of scripts stay
        looks = [look for _, look in self._left.values() if look is not None]
        containers = [vars(self.module), *children, *(each for look in looks for each in look.containers)]
        self.look = Look(containers, [each for look in looks for each in look.attributes])

    def check_children(self) -> None:
        """Raises RuntimeError unless the module has the modules in it that it had."""
        if self.look is not None and self.look.is_over() and not self._has_its_children():
            raise RuntimeError(
                f"the modules in {type(self.module).__name__} are no longer those of this step: {ADVICE}"
            )

    def _has_its_children(self) -> bool:
        now = list(self.module._modules.values())
        return len(now) == len(self._children) and all(map(is_, now, self._children))

    def changed(self) -> list[str]:
        """What is another, new or gone."""
        if self.look is None or not self.look.is_over():
            return []
        found = dict(own_attributes(self.module))
        gone = [name for name in self._left if name not in found]
        return gone + [name for name, value in found.items() if not self._is_as_left(name, value)]

    def _is_as_left(self, name: str, value: Any) -> bool:
        left, look = self._left.get(name, (_NEW, None))
        return _is_same(value, left) and (look is None or not look.is_over())


_NEW = object()


def _is_same(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and type(now) in PLAIN and bool(now == then))
