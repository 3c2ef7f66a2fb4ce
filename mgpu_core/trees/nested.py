"""Nested objects, taken apart into leaves and put together again.

The rules, in this order: a tensor is a leaf; packed sequences, nested, sparse and quantized tensors are refused, with
their path; then containers are opened (:mod:`mgpu_core.trees.containers` knows which); everything else is a leaf.  A
:class:`Tree` is the structure without the leaves: it can be compared, and filled with other leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core.devices.transfer import to_device
from mgpu_core.trees.containers import opened

__all__ = [
    "LEAF",
    "RankParts",
    "Replicate",
    "Rows",
    "Tree",
    "any_tensor",
    "are_divisible",
    "cloned",
    "flatten",
    "flatten_alike",
    "is_undivided",
    "map_leaves",
    "moved",
    "tensors_in",
    "unwrapped",
]

T = TypeVar("T")


class Replicate:
    """Marks an argument that every rank gets whole: ``model(x, mgpu_core.Replicate(table))``.

    Its tensors are copied to each rank instead of being split along ``dim``; the module receives the bare value.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Replicate({self.value!r})"


class Rows(list[T]):
    """Marks a list with one entry per row: ``step(images, target=mgpu_core.Rows(boxes))``.

    Its entries, of any type, are distributed like the rows of the tensors next to it.  Their own tensors are not
    cut, but go to the rank's device.  The module or the loss receives a plain list of its rank's entries.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Rows({super().__repr__()})"


class RankParts:
    """A batch's tensor, or its :class:`Rows`, whose rows are on the devices of their ranks already.

    As an argument of a wrapper or a step it is passed on as it is.  Functions and attributes of torch see its rows
    joined on the first rank's device; :meth:`joined` returns them.

    Attributes:
        parts: one per rank that has rows: tensors, or lists.
        dim: the dimension of the rows.
    """

    __slots__ = ("dim", "parts")

    def __init__(self, parts: Sequence[Any], dim: int) -> None:
        self.parts, self.dim = parts, dim

    @property
    def counts(self) -> list[int]:
        """The rows of each rank."""
        return [len(part) if isinstance(part, list) else part.size(self.dim) for part in self.parts]

    def joined(self, device: torch.device | None = None) -> Any:
        """Return the tensor, or the list, with all rows on ``device`` (default: the first rank's)."""
        if isinstance(self.parts[0], list):
            return [entry if device is None else moved(entry, device) for part in self.parts for entry in part]
        return torch.cat([to_device(part, device or self.parts[0].device) for part in self.parts], self.dim)

    def __len__(self) -> int:
        return sum(self.counts) if self.dim == 0 else len(self.parts[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.joined(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        joined = map_leaves((args, kwargs or {}), lambda leaf: leaf.joined() if isinstance(leaf, cls) else leaf)
        return function(*joined[0], **joined[1])


class Tree:
    """The shape of a nested object: how to build it from its children, and their names.

    ``kind`` and ``names`` say whether two trees are alike; ``build`` makes the object from the children's values.
    ``children`` is empty for a leaf, of which there is one: :data:`LEAF`.
    """

    __slots__ = ("build", "children", "kind", "names")

    def __init__(self, kind: Any, names: tuple[str, ...], children: tuple[Tree, ...], build: Any) -> None:
        self.kind, self.names, self.children, self.build = kind, names, children, build

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        """Return the object, with leaves taken from the iterator in the order in which :func:`flatten` gave them."""
        if self is LEAF:
            return next(leaves)
        return self.build([child.unflatten(leaves) for child in self.children])

    def columns(self, leaves: Iterator[Sequence[Any]], count: int) -> Sequence[Any]:
        """Return so many objects; the iterator has a column for each leaf, with its value in each object."""
        if self is LEAF:
            return next(leaves)
        children: list[Sequence[Any]] = []
        for child in self.children:
            children += (next(leaves) if child is LEAF else child.columns(leaves, count),)
        rows = list(zip(*children, strict=True)) if children else [()] * count
        return rows if self.build is tuple else list(map(self.build, map(list, rows)))

    @property
    def form(self) -> Hashable:
        """A key that is equal for trees of one shape, kinds and names."""
        return self.kind, self.names, tuple([child.form for child in self.children])

    def paths(self, root: str) -> list[str]:
        """Return the path of each leaf, such as ``inputs[1]["x"].mask``."""
        if self is LEAF:
            return [root]
        return [
            path for name, child in zip(self.names, self.children, strict=True) for path in child.paths(root + name)
        ]

    def difference(self, other: Tree, root: str) -> str | None:
        """Return how the other tree differs from this one, as a sentence; ``None`` if it does not."""
        if self is LEAF and other is LEAF:
            return None
        if self.kind is not other.kind:
            return f"{root} is {_kind_name(self)} on one rank and {_kind_name(other)} on another"
        if self.names != other.names:
            text = f"{root} has {_names(self)} on one rank and {_names(other)} on another"
            if issubclass(self.kind, Mapping) and len(self.names) != len(other.names):
                return f"All dicts must have the same number of keys: {text}"  # as torch words it
            return text
        for name, mine, theirs in zip(self.names, self.children, other.children, strict=True):
            if reason := mine.difference(theirs, root + name):
                return reason
        return None


LEAF = Tree(None, (), (), None)
_BARE = {torch.Tensor}
_DIVISIBLE = {(torch.strided, False, False)}
_device_of = attrgetter("device")
_form_of = attrgetter("layout", "is_nested", "is_quantized")


_NO_ENTRIES = Tree(dict, (), (), dict)


@lru_cache(maxsize=64)
def _tuple_of(count: int) -> Tree:
    """Return the tree of a tuple of so many leaves."""
    return Tree(tuple, tuple([f"[{i}]" for i in range(count)]), (LEAF,) * count, tuple)


def _kind_name(tree: Tree) -> str:
    return "a leaf" if tree is LEAF else f"a {tree.kind.__name__}"


def _names(tree: Tree) -> str:
    return f"{len(tree.names)} entries ({', '.join(tree.names)})" if tree.names else "no entries"


def flatten(
    obj: Any, leaves: list[Any], path: str, *, whole: bool = False, share: bool = False, like: Tree | None = None
) -> Tree:
    """Append the leaves of ``obj`` to ``leaves`` and return its tree; ``path`` names ``obj`` in errors.

    Args:
        whole: nothing will be split or joined, so packed sequences and tensors of all kinds are leaves.
        share: a container in ``obj`` without any tensor below it is one leaf, so that it is handed on as it is.
        like: mappings with the keys of this tree's give them in its order.

    Raises:
        TypeError: a packed sequence, a nested, sparse or quantized tensor, which cannot be split along a dimension.
    """
    kind = type(obj)
    if kind is torch.Tensor:
        if not whole and _form_of(obj) not in _DIVISIBLE:
            _refuse_undivided(obj, path)
        leaves += (obj,)
        return LEAF
    if kind is tuple and set(map(type, obj)) <= _BARE:  # as most inputs are: there is no need to open it
        if not whole and not set(map(_form_of, obj)) <= _DIVISIBLE:
            for index, tensor in enumerate(obj):
                _refuse_undivided(tensor, f"{path}[{index}]")
        leaves += obj
        return _tuple_of(len(obj))
    if kind is dict and not obj:
        return _NO_ENTRIES
    if isinstance(obj, torch.Tensor | PackedSequence | Rows):
        if not whole and not isinstance(obj, Rows):
            _refuse_undivided(obj, path)
        leaves.append(obj)
        return LEAF
    container = opened(obj)
    if container is None:
        leaves.append(obj)
        return LEAF
    names, values, build = container
    if like is not None and isinstance(obj, Mapping):
        names, values = _in_order_of(like, list(names), list(values))
    names = tuple(names)
    examples = like.children if like is not None and like.names == names else (None,) * len(names)
    children = []
    for name, value, example in zip(names, values, examples, strict=True):
        before = len(leaves)
        child = flatten(value, leaves, path + name, whole=whole, share=share, like=example)
        if share and child is not LEAF and not any_tensor(leaves[before:]):
            leaves[before:] = [value]
            child = LEAF
        children.append(child)
    return Tree(type(obj), names, tuple(children), build)


def flatten_named(objects: Mapping[str, Any], leaves: list[Any], *, share: bool = True) -> list[Tree]:
    """Append the leaves of several objects, by their names in errors, and return their trees; see :func:`flatten`."""
    trees: list[Tree] = []
    for name, obj in objects.items():
        trees += (flatten(obj, leaves, name, share=share),)
    return trees


def unflatten_columns(trees: Sequence[Tree], columns: Sequence[Sequence[Any]], count: int) -> list[Sequence[Any]]:
    """Return of each tree so many objects; there is a column for each leaf, with its value in each object."""
    rest = iter(columns)
    objects: list[Sequence[Any]] = []
    for tree in trees:
        objects += (tree.columns(rest, count),)
    return objects


def any_tensor(leaves: Sequence[Any]) -> bool:
    """Return whether one of them is a tensor, or holds some."""
    return any(isinstance(leaf, torch.Tensor | PackedSequence | Replicate | Rows | RankParts) for leaf in leaves)


def flatten_alike(objects: Sequence[Any], name: str) -> tuple[Tree, list[list[Any]]]:
    """Return the tree of one object per rank, all of one structure, and each rank's leaves in the first one's order.

    Raises:
        ValueError: objects of different structure; it says where.
        TypeError: as :func:`flatten`.
    """
    rows: list[list[Any]] = [[] for _ in objects]
    first = flatten(objects[0], rows[0], name)
    for rank in range(1, len(rows)):
        if reason := first.difference(flatten(objects[rank], rows[rank], name, like=first), name):
            raise ValueError(f"the ranks' {name} differ in structure: {reason}")
    return first, rows


def _in_order_of(like: Tree, names: list[str], values: list[Any]) -> tuple[list[str], list[Any]]:
    """Return entries in the other mapping's order, if both have the same names, each once; else unchanged."""
    entries = dict(zip(names, values, strict=True))
    if len(entries) != len(names) or entries.keys() != set(like.names) or len(entries) != len(like.names):
        return names, values
    return list(like.names), [entries[name] for name in like.names]


def is_undivided(tensor: torch.Tensor) -> bool:
    """Return whether the tensor cannot be split along a dimension: nested, sparse or quantized."""
    return _form_of(tensor) not in _DIVISIBLE


def are_divisible(leaves: Iterable[Any]) -> bool:
    """Return whether all are bare tensors that can be split along a dimension."""
    return set(map(type, leaves)) <= _BARE and set(map(_form_of, leaves)) <= _DIVISIBLE


def _refuse_undivided(tensor: torch.Tensor | PackedSequence, path: str) -> None:
    if isinstance(tensor, PackedSequence):
        raise TypeError(f"{path} is a PackedSequence: pass the padded tensor and its lengths, and pack in forward")
    if tensor.is_nested:
        raise TypeError(f"{path} is a nested tensor, which cannot be split or joined along a dimension")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{path} is a sparse tensor ({tensor.layout}), which cannot be split; use .to_dense()")
    if tensor.is_quantized:  # fresh memory of such a dtype has no scale
        raise TypeError(f"{path} is a quantized tensor ({tensor.dtype}), which cannot be split; use .dequantize()")


def unwrapped(obj: Any) -> Any:
    """Return the nest with the value of each :class:`Replicate`, :class:`Rows` and :class:`RankParts`.

    For a module that runs whole.
    """
    leaves: list[Any] = []
    tree = flatten(obj, leaves, "inputs", whole=True)
    if not any(isinstance(leaf, Replicate | Rows | RankParts) for leaf in leaves):
        return obj
    return tree.unflatten(iter(map(_unmarked, leaves)))


def map_leaves(obj: Any, function: Callable[[Any], Any]) -> Any:
    """Return the nest with ``function(leaf)`` in place of each leaf, whether a tensor or not."""
    if isinstance(obj, torch.Tensor):
        return function(obj)
    leaves: list[Any] = []
    return flatten(obj, leaves, "value", whole=True).unflatten(map(function, leaves))


def cloned(obj: Any) -> Any:
    """Return the nest with a copy of each tensor, which may be written."""
    return map_leaves(obj, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def tensors_in(obj: Any) -> list[torch.Tensor]:
    """Return the tensors of the nest, in order."""
    if isinstance(obj, torch.Tensor):
        return [obj]
    leaves: list[Any] = []
    flatten(obj, leaves, "value", whole=True)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _unmarked(leaf: Any) -> Any:
    if isinstance(leaf, Replicate):
        return unwrapped(leaf.value)
    if isinstance(leaf, RankParts):
        return leaf.joined()
    return [unwrapped(each) for each in leaf] if isinstance(leaf, Rows) else leaf


def moved(obj: Any, device: torch.device) -> Any:
    """Return the nest with its tensors on ``device``, without copying those already there; markers are removed."""
    kind = type(obj)
    if kind is tuple and set(map(type, obj)) <= _BARE and set(map(_device_of, obj)) <= {device}:
        return obj
    if kind is dict and not obj:
        return obj
    if kind is torch.Tensor or isinstance(obj, torch.Tensor):
        return obj if obj.device == device else to_device(obj, device)
    leaves: list[Any] = []
    tree = flatten(obj, leaves, "inputs", whole=True, share=True)
    return tree.unflatten(iter([_moved(leaf, device) for leaf in leaves])) if any_tensor(leaves) else obj


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Replicate):
        return moved(leaf.value, device)
    if isinstance(leaf, RankParts):
        return leaf.joined(device)
    if isinstance(leaf, Rows):
        return [moved(each, device) for each in leaf]
    if isinstance(leaf, PackedSequence) and leaf.data.device != device:
        return leaf._replace(data=to_device(leaf.data, device))
    if isinstance(leaf, torch.Tensor) and leaf.device != device:
        return to_device(leaf, device)
    return leaf
