"""All arguments together: taken apart into leaves, which must agree on their rows, and put together again."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from mgpu_core.parallel.scatter_inputs.unknown import warn_unknown
from mgpu_core.trees.nested import RankParts, Rows, Tree, flatten

__all__ = ["Arguments", "has_rows", "sliced"]


class Arguments:
    """Several objects, taken apart together: they are cut at the same rows.

    Args:
        objects: by their names in errors.

    Attributes:
        leaves: of all objects, one after the other.
        trees: one per object.

    Raises:
        TypeError: packed sequences, nested, sparse and quantized tensors.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self.leaves: list[Any] = []
        self._names = list(objects)
        self.trees: list[Tree] = []
        for name, obj in objects.items():
            self.trees += (flatten(obj, self.leaves, name, share=True),)

    def rebuild(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the objects, with these leaves."""
        rest = iter(leaves)
        return [tree.unflatten(rest) for tree in self.trees]

    def spread(self, columns: Sequence[Sequence[Any]], ranks: int) -> list[Sequence[Any]]:
        """Return of each object one per rank, with the rank's entry of each column as its leaves."""
        rest = iter(columns)
        objects: list[Sequence[Any]] = []
        for tree in self.trees:
            objects += (tree.unflatten_columns(rest, ranks),)
        return objects

    def path(self, position: int) -> str:
        """Return the path of the leaf: ``inputs[1]["x"]``."""
        paths = [path for name, tree in zip(self._names, self.trees, strict=True) for path in tree.paths(name)]
        return paths[position]

    def numbers_per_rank(self, name: str, ranks: int, dim: int) -> set[int]:
        """Return the leaves of one object that have one number per rank, where other tensors have other rows."""
        sized = {position: leaf for position, leaf in enumerate(self.leaves) if has_rows(leaf, dim)}
        if all(leaf.size(dim) == ranks for leaf in sized.values()):
            return set()
        at = self._names.index(name)
        begin, count = (sum(len(tree.paths("")) for tree in trees) for trees in (self.trees[:at], [self.trees[at]]))
        mine = range(begin, begin + count)
        return {
            position for position, leaf in sized.items() if position in mine and leaf.numel() == leaf.size(dim) == ranks
        }

    def rows(self, dim: int, but: Collection[int] = ()) -> int | None:
        """Return the rows along ``dim`` of the first leaf that has some, checked against all others; or ``None``.

        Args:
            but: leaves that are not looked at.

        Raises:
            ValueError: leaves that differ in their rows.
            IndexError: a tensor without dimension ``dim``.
        """
        first = rows = None
        for position, leaf in enumerate(self.leaves):
            if position in but:
                continue
            if type(leaf) is torch.Tensor or isinstance(leaf, torch.Tensor):
                if not leaf.ndim:
                    continue
                if not -leaf.ndim <= dim < leaf.ndim:
                    raise IndexError(
                        f"{self.path(position)} has shape {tuple(leaf.shape)} and cannot be cut along dimension {dim}"
                    )
                found = leaf.shape[dim]
            elif isinstance(leaf, Rows | RankParts):
                found = _rows_of(leaf, dim)
            else:
                continue
            if first is None:
                first, rows = position, found
            elif found != rows:
                raise ValueError(self._disagreement(first, position, dim))
        return rows

    def warn_unknown(self, position: int, rows: int) -> None:
        """Warn once of a leaf of which nothing is cut although something in it has rows, or tensors."""
        warn_unknown(self.leaves[position], partial(self.path, position), rows)

    def slices(self, counts: list[int], dim: int) -> Iterator[list[Any]]:
        """Yield the objects of each part: views of tensors, and their :class:`Rows`; all else is shared."""
        for position in range(len(self.leaves)):
            self.warn_unknown(position, sum(counts))
        columns = [sliced(leaf, counts, dim) for leaf in self.leaves]
        return (self.rebuild(leaves) for leaves in zip(*columns, strict=True))

    def _disagreement(self, one: int, other: int, dim: int) -> str:
        paths = [self.path(position) for position in (one, other)]
        described = [
            f"{path} has {_size_of(self.leaves[position])}" for path, position in zip(paths, (one, other), strict=True)
        ]
        advice = self._advice(one, other, dim)
        return f"the inputs differ in their number of rows along dimension {dim}: {', '.join(described)}. {advice}"

    def _advice(self, one: int, other: int, dim: int) -> str:
        """Return what to do about two leaves that differ in their rows."""
        few, many = sorted((one, other), key=lambda position: _rows_of(self.leaves[position], dim))
        if found := "; or ".join(self._ways(few, many, dim)):
            return found
        advice = "What every rank should get whole goes into mgpu_core.Replicate(...)"
        alike = {re.sub(r"\[\d+\]", "[]", self.path(position)) for position in (one, other)}
        if len(alike) == 1 and alike != {"inputs[]"}:  # of one list, not two arguments
            advice += "; a list with one entry per row into mgpu_core.Rows(...)"
        return advice

    def _ways(self, few: int, many: int, dim: int) -> Iterator[str]:
        """Yield how a tensor of few rows and one of many can be passed, as far as their shapes tell."""
        one, other = self.leaves[few], self.leaves[many]
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return
        rows, most = one.size(dim), other.size(dim)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        for axis in range(min(leaf.dim() for leaf in tensors)):
            sizes = {leaf.size(axis) for leaf in tensors}
            if axis != dim and len(sizes) == 1 and sizes != {1}:
                yield (
                    f"All have {sizes.pop()} entries along dimension {axis}: if those are the rows, pass dim={axis} "
                    f"to the wrapper or the step, or --dim {axis} to `mgpu run`"
                )
                break
        for axis, size in enumerate(one.shape):
            if axis != dim and size == most > 1:
                name = self.path(few)
                yield (
                    f"{name} has {most} entries along dimension {axis}: if those are its rows, pass "
                    f"{name}.transpose({dim}, {axis})"
                )
                return
        if 1 < rows < most and most % rows == 0:
            folded = f"{self.path(many)}.unflatten({dim}, ({rows}, {most // rows}))"
            yield (
                f"{self.path(many)} has {most // rows} rows for each of {self.path(few)}: pass {folded}, and flatten "
                "it in the forward"
            )
        elif other.dim() == 1 and any(leaf.shape == (rows,) for leaf in tensors):
            yield "Flat data with a length per row goes into mgpu_core.Rows(x.split(lengths))"


def _rows_of(leaf: torch.Tensor | Rows[Any] | RankParts, dim: int) -> int:
    if isinstance(leaf, RankParts):
        return sum(leaf.counts)
    return len(leaf) if isinstance(leaf, Rows) else leaf.size(dim)


def _size_of(leaf: torch.Tensor | Rows[Any] | RankParts) -> str:
    return f"shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"{_rows_of(leaf, 0)} rows"


def has_rows(leaf: Any, dim: int) -> bool:
    """Return whether it is a tensor with dimension ``dim``."""
    return isinstance(leaf, torch.Tensor) and -leaf.dim() <= dim < leaf.dim()


def sliced(leaf: Any, counts: list[int], dim: int) -> Sequence[Any]:
    """Return the parts of a leaf: views of a tensor, its :class:`Rows`; anything else is the same in all parts."""
    if isinstance(leaf, Rows):
        entries = iter(leaf)
        return [Rows(islice(entries, count)) for count in counts]
    return leaf.split(counts, dim) if has_rows(leaf, dim) else [leaf] * len(counts)
