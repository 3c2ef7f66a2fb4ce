"""Objects among the arguments of a call, such as caches, of which every rank has its own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from mgpu_core.devices.transfer import to_device
from mgpu_core.trees.layer_holders import slots_of
from mgpu_core.trees.nested import flatten

__all__ = ["PLAIN", "Objects", "tensors_held"]

_DEPTH = 8
_VALUES = frozenset((str, bytes, int, float, bool, type(None), torch.dtype, torch.device))


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, range, slice)
"""Classes of arguments that no module can write; all else is copied for each rank."""


class _OfRanks(NamedTuple):
    """An object of rank 0's, which a caller has, and those of the other ranks.

    Attributes:
        first: a weak reference to rank 0's.
        others: by rank, from 1.
        contents: of rank 0's after the last call.
        was_written: a call has changed it.
    """

    first: weakref.ref[Any]
    others: list[Any]
    contents: list[Any]
    was_written: bool

    def is_alike(self) -> bool:
        """Return whether rank 0's has the contents of after the last call."""
        now = _contents_of(self.first())
        return len(now) == len(self.contents) and all(map(_is_same, now, self.contents))


class Objects:
    """The objects that calls have been given, and have given back; a call is made inside ``with objects:``.

    Args:
        devices: of the ranks.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._others = devices[1:]
        self._known: dict[int, _OfRanks] = {}  # by the ids of rank 0's
        self._written: set[type] = set()  # the classes of those that calls have written
        self._given: dict[int, tuple[Any, list[Any]]] = {}  # to the call on its way, with the other ranks', by its id

    def __enter__(self) -> None:
        """Begin a call."""

    def __exit__(self, *_: object) -> None:
        """Keep nothing of a call that is over."""
        self._given = {}

    def of_rank(self, rank: int, given: Any) -> Any:
        """Return a rank's own of an object that calls have written, or a copy of one that a user made.

        Rank 0 has the object itself: one that no other rank asks for is not copied.

        Raises:
            TypeError: it cannot be copied; the user has written one that calls have written, too.
        """
        if not rank:
            return given
        if id(given) not in self._given:
            entry = self._find(given)
            if entry is None or not entry.is_alike():
                self._check(given, entry)
                others = _copied(given, self._others)
                self._remember([given, *others], was_written=False)
            else:
                others = entry.others
            self._given[id(given)] = given, others
        return self._given[id(given)][1][rank - 1]

    def _find(self, given: Any) -> _OfRanks | None:
        entry = self._known.get(id(given))
        return entry if entry is not None and entry.first() is given else None

    def _check(self, given: Any, entry: _OfRanks | None) -> None:
        name = type(given).__name__
        if entry is not None and entry.was_written:
            raise TypeError(
                f"a {name} that calls have written was changed between them, and the other ranks' were not: make a new "
                "one"
            )
        if entry is None and type(given) in self._written and any(each.numel() for each in tensors_held(given)):
            raise TypeError(
                f"a {name} with contents that no call of this TensorParallel has given back, such as a copy: they are "
                "those of one rank alone. Pass the one that came back, or an empty one"
            )

    def _remember(self, of_ranks: Sequence[Any], *, was_written: bool) -> None:
        """Keep the other ranks' objects as long as rank 0's lives."""
        key, known = id(of_ranks[0]), self._known
        try:
            first = weakref.ref(of_ranks[0], lambda _: known.pop(key, None))
        except TypeError:  # it cannot be known again
            return
        known[key] = _OfRanks(first, list(of_ranks[1:]), _contents_of(of_ranks[0]), was_written)
        if was_written:
            self._written.add(type(of_ranks[0]))

    def end(self, results: Sequence[Any]) -> None:
        """Note which objects the call has written, and those that come back from it.

        Args:
            results: one per rank.
        """
        for given, others in self._given.values():
            entry = self._find(given)
            if entry is not None and not entry.is_alike():
                self._remember([given, *others], was_written=True)
        nests: list[list[Any]] = [[] for _ in results]
        for leaves, result in zip(nests, results, strict=True):
            flatten(result, leaves, "outputs", whole=True)
        if len({len(leaves) for leaves in nests}) == 1:
            for of_ranks in zip(*nests, strict=True):
                if not isinstance(of_ranks[0], (torch.Tensor, *PLAIN)) and self._find(of_ranks[0]) is None:
                    self._remember(of_ranks, was_written=True)


def _copied(given: Any, devices: Sequence[torch.device]) -> list[Any]:
    """Return a deep copy of an object for each device, with its tensors there.

    Raises:
        TypeError: it cannot be copied, or holds a tensor that requires grad, whose gradient would be one rank's.
    """
    tensors, name = tensors_held(given), type(given).__name__
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise TypeError(f"a {name} among the arguments holds a tensor that requires grad: pass it itself")
    try:
        return [
            copy.deepcopy(given, {id(each): to_device(each.detach(), device, copy=True) for each in tensors})
            for device in devices
        ]
    except Exception as error:
        raise TypeError(f"a {name} among the arguments cannot be copied for each rank: {error}") from error


def _contents_of(given: Any) -> list[Any]:
    """Return all that an object holds, at any depth: weak references, to tensors with their versions, and values.

    Every call asks this of the caches that it gives back, so there is no function call for each of their parts.
    """
    contents: list[Any] = []
    waiting: list[tuple[Any, int]] = [(given, _DEPTH)]
    seen: set[int] = set()
    for value, depth in waiting:  # to which parts of it are added
        if type(value) in _VALUES:
            contents += (value,)
        elif isinstance(value, torch.Tensor):
            contents += ((weakref.ref(value), -1 if value.is_inference() else value._version, value.shape),)
        elif depth and id(value) not in seen:
            seen.add(id(value))
            parts = _parts_of(value)
            contents += (_of_itself(value),) if parts is None else ()
            waiting += [(part, depth - 1) for part in parts or ()]
    return contents


def _parts_of(value: Any) -> Iterable[Any] | None:
    """Return the parts of a container or an object with attributes; ``None``: it has none that can be seen."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, Sequence | Set) and not isinstance(value, bytearray | memoryview):
        return value
    parts = [*vars(value).values()] if hasattr(value, "__dict__") else []
    parts += [getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)]  # type: ignore[arg-type]
    return parts or None


def _of_itself(value: Any) -> Any:
    """Return the bytes of an array, or a weak reference; a value that can have none is compared as it is."""
    try:
        return bytes(memoryview(value))
    except (TypeError, ValueError):
        pass
    try:
        return (weakref.ref(value),)
    except TypeError:
        return value


def tensors_held(given: Any) -> list[torch.Tensor]:
    """Return the tensors that an object holds, at any depth."""
    referents = (entry[0]() for entry in _contents_of(given) if isinstance(entry, tuple))
    return [each for each in referents if isinstance(each, torch.Tensor)]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0]() is other[0]() is not None and one[1:] == other[1:]
    return one is other or (type(one) is type(other) and bool(one == other))
