"""Objects that ranks may write, of which every rank has its own.

Among the arguments of a call such as caches, and in attributes of the module such as the state of a stream.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from mgpu_core.devices.transfer import to_device
from mgpu_core.trees.module_tree import ModuleTree
from mgpu_core.trees.nested import flatten
from mgpu_core.trees.views import attributes_of, is_note

__all__ = ["PLAIN", "Objects"]

_DEPTH = 8
_NOWHERE = torch.device("meta")
_BUILTIN = (dict, list, tuple, set, frozenset, deque)
_VALUES = frozenset((str, bytes, int, float, bool, type(None), torch.dtype, torch.device, RemovableHandle))


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, range, slice)
"""Classes of arguments that no module can write; all else is copied for each rank."""


class _OfRanks(NamedTuple):
    """An object of rank 0's, which a caller has, and those of the other ranks.

    Attributes:
        first: returns rank 0's: a weak reference, or a function that holds it.
        others: by rank, from 1.
        contents: of rank 0's after the last call.
        was_written: a call has changed it.
    """

    first: Callable[[], Any]
    others: list[Any]
    contents: list[Any]
    was_written: bool

    def is_alike(self) -> bool:
        """Return whether rank 0's has the contents of after the last call."""
        now = _contents_of(self.first())
        return len(now) == len(self.contents) and all(map(_is_same, now, self.contents))


class _PlainObjects:
    """Objects that hold no tensor at any depth, such as configurations, compared by operators that run in C.

    Args:
        objects: of which only those without tensors are among them.

    Attributes:
        ids: of these.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self.ids: set[int] = set()
        self._tables: list[Any] = []
        for value in objects:
            opened: list[Any] = []
            if not any(isinstance(part, tuple) for part in _contents_of(value, opened)):
                self.ids.add(id(value))
                self._tables += opened
        self._before = list(map(copy.copy, self._tables))

    @property
    def are_as_before(self) -> bool:
        """Return whether all have the contents that they had."""
        try:
            return all(map(operator.eq, self._tables, self._before))
        except Exception:  # of a value whose class compares in its own way
            return False


class Objects:
    """The objects that calls have been given, and have given back.

    Args:
        devices: of the ranks.
        registered: the ids of Parameters and buffers of the module.

    Attributes:
        given: to the call on its way, by their ids: rank 0's, the other ranks', and whether it is an attribute; to be
            cleared when the call is over.
    """

    def __init__(self, devices: Sequence[torch.device], registered: Container[int]) -> None:
        self._devices, self._registered = devices, registered
        self._known: dict[int, _OfRanks] = {}  # by the ids of rank 0's
        self._held: set[int] = set()  # of these the ids of those that this object holds, for an attribute
        self._written: set[type] = set()  # the classes of those that calls have written
        self._values: list[Any] = []  # of all attributes of the module's tree, in the last call
        self._attributes: list[tuple[int, str, Any, int]] = []  # of these, ranks have their own
        self._plain = _PlainObjects([])  # those of them
        self.given: dict[int, tuple[Any, list[Any], bool]] = {}

    def of_rank(self, rank: int, given: Any) -> Any:
        """Return a rank's own of an object that calls have written, or a copy of one that a user made.

        Rank 0 has the object itself.

        Raises:
            TypeError: it cannot be copied; the user has written one that calls have written, too.
        """
        return self._others(given, "a {} among the arguments")[rank - 1]

    def give_attributes(self, tree: ModuleTree, views: Sequence[Sequence[Module]]) -> None:
        """Give the other ranks' views of a module their own of the objects in its attributes.

        Args:
            tree: of the module.
            views: per rank those of the tree's modules; empty: only look whether there can be copies.
        """
        values = list(chain.from_iterable(map(dict.values, map(vars, tree.modules))))
        is_known = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        is_known = is_known and self._plain.are_as_before
        if not is_known:
            self._values = values
            self._attributes = [
                (index, name, value, id(value))
                for index, node in enumerate(tree.nodes)
                for name, value in attributes_of(node.module).items()
                if not _is_shared(value) and name not in node.holders
            ]
            self._plain = _PlainObjects([value for _, _, value, _ in self._attributes])
            ids = {key for _, _, _, key in self._attributes}
            for key in self._held - ids:
                self._known.pop(key, None)
            self._held &= ids
        for index, name, value, key in self._attributes:
            if is_known and key in self._plain.ids:
                others = self._known[key].others
                self.given[key] = value, others, True
            else:
                text = f"{name} of {type(tree.modules[index]).__name__}, a {{}},"
                others = self._others(value, text, is_attribute=True)
            for row, other in zip(views[1:], others, strict=bool(views)):
                row[index].__dict__[name] = other

    def give_copies(self, views: Sequence[Sequence[Module]]) -> None:
        """Give all ranks' views copies of these objects: nothing that is written there stays."""
        for row in views:
            for index, name, _, _ in self._attributes:
                state = row[index].__dict__
                (state[name],) = _copied(state[name], [_NOWHERE] * 2, name)

    def follow(
        self, tree: ModuleTree, views: Sequence[Sequence[Module]], assigned: Mapping[tuple[int, str], Any]
    ) -> None:
        """Note the values that each rank has assigned to attributes; the module has rank 0's.

        Args:
            tree: of the module.
            views: per rank those of the tree's modules.
            assigned: by rank 0, by the id of the module and the name.
        """
        for (owner, name), value in assigned.items():
            index = tree.indices[owner]
            if not _is_shared(value) and tree.nodes[index].module.__dict__.get(name) is value:
                of_ranks = [row[index].__dict__.get(name) for row in views]
                self._remember(of_ranks, was_written=True, is_attribute=True)

    def _others(self, given: Any, text: str, *, is_attribute: bool = False) -> list[Any]:
        """Return the other ranks' of an object, which the call on its way may write.

        Args:
            given: rank 0's.
            text: names it in errors, around the name of its class.
            is_attribute: of the module, which has it in the next call, too.
        """
        if id(given) not in self.given:
            entry, text = self._find(given), text.format(type(given).__name__)
            if entry is None or not entry.is_alike():
                self._check(given, entry, is_attribute=is_attribute)
                if any(id(tensor) in self._registered for tensor in _tensors_of(given)):
                    raise TypeError(f"{text} holds a Parameter or buffer of the module: read it where it is registered")
                others = _copied(given, self._devices, text)
                self._remember([given, *others], was_written=False, is_attribute=is_attribute)
            else:
                others = entry.others
            self.given[id(given)] = given, others, is_attribute
        return self.given[id(given)][1]

    def _find(self, given: Any) -> _OfRanks | None:
        entry = self._known.get(id(given))
        return entry if entry is not None and entry.first() is given else None

    def _check(self, given: Any, entry: _OfRanks | None, *, is_attribute: bool) -> None:
        name = type(given).__name__
        if entry is not None and entry.was_written:
            raise TypeError(
                f"a {name} that calls have written was changed between them, and the other ranks' were not: make a new "
                "one"
            )
        if is_attribute:  # the user has assigned it
            return
        if entry is None and type(given) in self._written and any(each.numel() for each in _tensors_of(given)):
            raise TypeError(
                f"a {name} with contents that no call of this TensorParallel has given back, such as a copy: they are "
                "those of one rank alone. Pass the one that came back, or an empty one"
            )

    def _remember(self, of_ranks: Sequence[Any], *, was_written: bool, is_attribute: bool = False) -> None:
        """Keep the other ranks' objects as long as rank 0's lives, or is in an attribute."""
        key, known = id(of_ranks[0]), self._known
        first: Callable[[], Any]
        try:
            first = weakref.ref(of_ranks[0], lambda _: known.pop(key, None))
        except TypeError:
            if not is_attribute:  # it cannot be known again
                return
            first = partial(_itself, of_ranks[0])
            self._held.add(key)
        known[key] = _OfRanks(first, list(of_ranks[1:]), _contents_of(of_ranks[0]), was_written)
        if was_written:
            self._written.add(type(of_ranks[0]))

    def end(self, results: Sequence[Any]) -> None:
        """Note which objects the call has written, and those that come back from it.

        Args:
            results: one per rank.
        """
        unwritten = self._plain.ids if self._plain.are_as_before else ()
        for key, (given, others, is_attribute) in self.given.items():
            if is_attribute and key in unwritten:
                continue
            entry = self._find(given)
            if entry is not None and not entry.is_alike():
                self._remember([given, *others], was_written=True, is_attribute=is_attribute)
        nests: list[list[Any]] = [[] for _ in results]
        for leaves, result in zip(nests, results, strict=True):
            flatten(result, leaves, "outputs", whole=True)
        if len({len(leaves) for leaves in nests}) == 1:
            for of_ranks in zip(*nests, strict=True):
                if not isinstance(of_ranks[0], (torch.Tensor, *PLAIN)) and self._find(of_ranks[0]) is None:
                    self._remember(of_ranks, was_written=True)


def _is_shared(value: Any) -> bool:
    """Return whether an attribute of the module is one that ranks can share: nothing can be written into it."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_shared, value))
    return type(value) in _VALUES or (not isinstance(value, list | dict | set) and is_note(value))


def _itself(obj: Any) -> Any:
    return obj


def _copied(given: Any, devices: Sequence[torch.device], text: str) -> list[Any]:
    """Return a deep copy of an object for each rank but the first, with tensors of the first device on the rank's.

    Raises:
        TypeError: it cannot be copied, or holds a tensor that requires grad, whose gradient would be one rank's.
    """
    tensors = _tensors_of(given)
    handles = {id(each): each for each in _contents_of(given) if isinstance(each, RemovableHandle)}
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise TypeError(f"{text} holds a tensor that requires grad: pass it itself")

    def on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor.detach(), device if tensor.device == devices[0] else tensor.device, copy=True)

    try:
        return [
            copy.deepcopy(given, handles | {id(each): on(device, each) for each in tensors}) for device in devices[1:]
        ]
    except Exception as error:
        raise TypeError(f"{text} cannot be copied for each rank: {error}") from error


def _contents_of(given: Any, opened: list[Any] | None = None) -> list[Any]:
    """Return all that an object holds, at any depth: weak references to tensors with their versions, and values.

    Every call asks this of the caches that it gives back, so there is no function call for each of their parts.

    Args:
        given: the object.
        opened: gets the containers, and the dicts of objects' attributes.
    """
    contents: list[Any] = []
    waiting: list[tuple[Any, int]] = [(given, _DEPTH)]
    seen: set[int] = set()
    for value, depth in waiting:  # to which parts of it are added
        if type(value) in _VALUES:
            contents += (value,)
        elif isinstance(value, torch.Tensor):
            try:
                version = value._version
            except RuntimeError:  # an inference tensor has none
                version = -1
            contents += ((weakref.ref(value), version, value.shape),)
        elif depth and id(value) not in seen:
            seen.add(id(value))
            table: Any = value
            if not isinstance(value, _BUILTIN):  # a module writes its own
                table = () if isinstance(value, Module | type) else getattr(value, "__dict__", ())
            waiting += [(part, depth - 1) for part in table]
            if isinstance(table, dict):
                waiting += [(part, depth - 1) for part in table.values()]
            if opened is not None:
                opened.append(table)
    return contents


def _tensors_of(given: Any) -> list[torch.Tensor]:
    tensors = (each[0]() for each in _contents_of(given) if isinstance(each, tuple))
    return [each for each in tensors if each is not None]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0]() is other[0]() is not None and one[1:] == other[1:]
    return type(one) is type(other) and bool(one == other)
