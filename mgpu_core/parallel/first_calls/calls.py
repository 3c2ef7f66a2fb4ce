"""The first calls, their observers, and the counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.nn import Module

__all__ = ["Arguments", "Call", "FirstCalls", "Observer"]

Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(slots=True, eq=False)
class Call:
    """A call that is looked at.

    Attributes:
        modules: of the ranks.
        tree: the module that they are made of, where it is known.
        called: what runs in their place: themselves, or their methods; observers may exchange it.
        arguments: of each rank.
        rows: of each rank; -1: unknown.
        outputs: of each rank, once they are there.
        kept: what each observer keeps until the end of the call.
    """

    modules: Sequence[Module]
    tree: Any = None
    called: Sequence[Any] = ()
    arguments: Sequence[Arguments] = ()
    rows: Sequence[int] = ()
    outputs: Sequence[Any] = ()
    kept: dict[Observer, Any] = field(default_factory=dict)


class Observer:
    """Looks at something in the first calls."""

    def begin(self, call: Call) -> None:
        """Look at a call before it runs."""

    def end(self, call: Call) -> bool:
        """Look at a call that has ended well, and warn; return whether nothing is left to look for."""
        raise NotImplementedError

    def changed(self, call: Call) -> list[str]:
        """Return the names of what a call has changed so far, for the error of a call that fails."""
        return []


class FirstCalls:
    """Counts calls, and lets each observer look at so many; later calls pay nothing.

    Args:
        observers: each with the number of calls that it looks at.

    Attributes:
        go_on: the next call is looked at.
    """

    def __init__(self, *observers: tuple[Observer, int]) -> None:
        self._observers, self._calls = list(observers), 0
        self.go_on = bool(observers)

    def begin(self, call: Call) -> Call:
        """Count a call, and look at it before it runs; return it."""
        self._calls += 1
        for observer, _ in self._observers:
            observer.begin(call)
        return call

    def end(self, call: Call, outputs: Sequence[Any] = ()) -> None:
        """Look at a call that has ended well."""
        call.outputs = outputs
        told = {observer for observer, _ in self._observers if observer.end(call)}
        self._observers = [each for each in self._observers if each[0] not in told and each[1] > self._calls]
        self.go_on = bool(self._observers)

    def changed(self, call: Call) -> list[str]:
        """Return the names of what a call that failed has changed so far."""
        return [name for observer, _ in self._observers for name in observer.changed(call)]
