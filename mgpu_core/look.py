"""Whether what a step depends on is still as it was: asked in every step, so all of it is looked at in C."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mgpu_core import _core

__all__ = ["Look"]


class Look:
    """What some objects are, at the time when this is made.

    It may say that something has changed where nothing has; whoever then looks closely finds out.

    Args:
        containers: lists and dicts, whose entries (and keys) are looked at.
        attributes: pairs of an object and the name of an attribute.
        calls: without arguments, and without effect.

    Attributes:
        containers, attributes: the same.
    """

    __slots__ = ("_calls", "_found", "attributes", "containers")

    def __init__(
        self,
        containers: Iterable[Any] = (),
        attributes: Iterable[tuple[Any, str]] = (),
        calls: Iterable[Callable[[], Any]] = (),
    ) -> None:
        self.containers, self.attributes, self._calls = list(containers), list(attributes), list(calls)
        self.take_again()

    def take_again(self) -> None:
        """What is there now is what later looks compare with."""
        self._found = _core.look_at(self.containers, self.attributes, self._calls)

    def is_over(self) -> bool:
        """Whether anything is another object now, or another number."""
        return not _core.looks_like(self.containers, self.attributes, self._calls, self._found)
