"""Requests and batches: how arguments of several calls become those of one, and how its outputs are split again."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from mgpu_core.nested import Tree, flatten

__all__ = ["Request", "joined", "split_outputs"]


class Request:
    """The arguments of one call, and the future that gets its outputs.

    Attributes:
        future: of the outputs.
        rows: along dimension 0 of its tensors, 1 or more.
        key: requests with equal keys can be joined: same structure, dtypes, row shapes and other arguments.
        device: of its first tensor.
        begin: when it was made, seconds of ``time.perf_counter``.

    Raises:
        ValueError: no tensor, no rows, or tensors that disagree on their rows.
    """

    __slots__ = ("begin", "device", "future", "key", "leaves", "rows", "tree")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.future: Future[Any] = Future()
        self.leaves: list[Any] = []
        self.tree = flatten((args, kwargs), self.leaves, "inputs")
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        rows = {tensor.size(0) if tensor.dim() else 0 for tensor in tensors}
        if len(rows) != 1 or not rows - {0}:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
            raise ValueError(f"a request needs tensors with one number of rows, 1 or more, along dimension 0: {shapes}")
        (self.rows,) = rows
        self.device = tensors[0].device
        self.key: Hashable = (_form_of(self.tree), *map(_key_of, self.leaves))
        self.begin = time.perf_counter()

    def chunks(self, most: int) -> list[Request]:
        """Return requests of at most ``most`` rows each, of nearly equal sizes."""
        count = -(-self.rows // most)
        sizes = [self.rows // count + (index < self.rows % count) for index in range(count)]
        parts = [leaf.split(sizes) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in self.leaves]
        made = [self.tree.unflatten(iter(column)) for column in zip(*parts, strict=True)]
        return [Request(args, kwargs) for args, kwargs in made]


def _form_of(tree: Tree) -> Hashable:
    return tree.kind, tree.names, tuple(map(_form_of, tree.children))


def _key_of(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape[1:])
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), leaf


def joined(requests: Sequence[Request], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of one call on ``device`` for requests of one key."""
    columns = zip(*[request.leaves for request in requests], strict=True)
    leaves = [_joined_leaf(column, device) if isinstance(column[0], torch.Tensor) else column[0] for column in columns]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = requests[0].tree.unflatten(iter(leaves))
    return arguments


def _joined_leaf(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    moved = [part if part.device == device else part.to(device, non_blocking=True) for part in parts]
    return moved[0] if len(moved) == 1 else torch.cat(moved)


def split_outputs(outputs: Any, requests: Sequence[Request]) -> Iterator[Any]:
    """Yield each request's part of the outputs, on the request's device; leaves that are no tensors go to all.

    Raises:
        ValueError: a tensor whose first dimension is not the rows, with its path.
    """
    leaves: list[Any] = []
    tree = flatten(outputs, leaves, "outputs")
    rows = [request.rows for request in requests]
    for path, leaf in zip(tree.paths("outputs"), leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and (not leaf.dim() or leaf.size(0) != sum(rows)):
            raise ValueError(
                f"{path} has shape {tuple(leaf.shape)}, and no row for each of the {sum(rows)} rows of the inputs: it "
                "cannot be split among requests"
            )
    columns = [leaf.split(rows) if isinstance(leaf, torch.Tensor) else [leaf] * len(rows) for leaf in leaves]
    for index in range(len(rows)):
        yield tree.unflatten(iter([column[index] for column in columns]))
