"""The first calls, their observers, and who counts them."""

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
        module: the user's, as it is now.
        modules: of the ranks.
        tree: the module that they are made of, where it is known.
        called: these, or their methods, as they run; observers may exchange them.
        arguments: of each rank.
        rows: of each rank; -1: unknown.
        outputs: of each rank, once they are there.
        kept: of each observer, until the end of the call.
    """

    module: Module
    modules: Sequence[Module] = ()
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

    def end(self, call: Call) -> bool | None:
        """Look at a call that has ended well, and warn; return whether nothing is left to look for.

        ``None``: the call shows nothing, and does not count.
        """
        raise NotImplementedError

    def changed(self, call: Call) -> list[str]:
        """Return the names of all that a call has changed so far, for the error of a call that fails."""
        return []


class FirstCalls:
    """Lets each observer look at so many calls that end well; later calls pay nothing.

    Args:
        observers: each with the number of calls that it looks at.

    Attributes:
        go_on: the next call is looked at.
    """

    def __init__(self, *observers: tuple[Observer, int]) -> None:
        self._observers = list(observers)  # with the calls that are left
        self.go_on = bool(observers)

    def begin(self, call: Call) -> Call:
        """Look at a call before it runs; return it."""
        for observer, _ in self._observers:
            observer.begin(call)
        return call

    def end(self, call: Call, outputs: Sequence[Any] = ()) -> None:
        """Look at a call that has ended well."""
        call.outputs = outputs
        results = [(observer, left, observer.end(call)) for observer, left in self._observers]
        now = [(observer, left - (told is not None)) for observer, left, told in results if not told]
        self._observers = [each for each in now if each[1]]
        self.go_on = bool(self._observers)

    def changed(self, call: Call) -> list[str]:
        """Return the names of all that a call that failed has changed so far."""
        return [name for observer, _ in self._observers for name in observer.changed(call)]
