"""Requests and batches: how arguments of several calls become those of one, and how its outputs are split again."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import torch

from mgpu_core.device.streams import GPU_TYPE
from mgpu_core.device.transfer import copy_aside, hand_over
from mgpu_core.nested import Tree, flatten, is_undivided, map_leaves, tensors_in

__all__ = ["Call", "Joiner", "Request", "copied_to_host", "form_of", "key_of"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""


def form_of(tree: Tree) -> Hashable:
    """Return a key of the structure: equal for nests that differ in their leaves alone."""
    return tree.kind, tree.names, tuple(map(form_of, tree.children))


_ONE_TREE = flatten(((torch.empty(1),), {}), [], "inputs")
_ONE_TENSOR = _ONE_TREE, form_of(_ONE_TREE)


class Request:
    """The arguments of one call, and the future that gets its outputs.

    Attributes:
        call: the arguments.
        future: of the outputs.
        form: of its structure: equal for calls that differ in their leaves alone.
        key: requests with equal keys can be joined.
        rows: of a batch that it takes; all of them where it must not be joined.
        own_rows: along dimension 0 of its tensors, 1 or more.
        device: of its first tensor.
        ready: per accelerator of its tensors, an event after the work that makes them.
        begin: when it was made, seconds of ``time.perf_counter``.
    """

    __slots__ = ("begin", "call", "device", "form", "future", "key", "leaves", "own_rows", "ready", "rows", "tree")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.future: Future[Any] = Future()
        self.leaves: list[Any] = []
        args, kwargs = call
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and not is_undivided(args[0]):
            self.tree, self.form = _ONE_TENSOR  # no nest to walk
            self.leaves += args
        else:
            self.tree = flatten(call, self.leaves, "inputs")
            self.form = form_of(self.tree)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        rows = {tensor.size(0) if tensor.dim() else 0 for tensor in tensors}
        if len(rows) != 1 or not rows - {0}:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
            raise ValueError(f"a request needs tensors with one number of rows, 1 or more, along dimension 0: {shapes}")
        (self.own_rows,) = rows
        self.rows = self.own_rows
        self.device = tensors[0].device
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self.ready = [(each, torch.accelerator.current_stream(each).record_event()) for each in devices]
        self.key: Hashable = None
        self.begin = time.perf_counter()

    def chunks(self, count: int) -> list[Call]:
        """Return the calls of ``count`` parts of nearly equal numbers of rows."""
        sizes = [self.own_rows // count + (index < self.own_rows % count) for index in range(count)]
        parts = [leaf.split(sizes) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in self.leaves]
        return [self.tree.unflatten(iter(column)) for column in zip(*parts, strict=True)]


class Joiner:
    """How requests become a batch, and its outputs their answers.

    Args:
        bucket_by: a function of the arguments of a call; calls with unequal results are not joined.
        collate: a function of a list of calls, all of one bucket, that returns the joined call; ``None``: tensors are
            joined along dimension 0.
        split: a function of the outputs and of the list of calls that returns the output of each; ``None``: tensors
            are split along dimension 0, and other leaves go to all.
    """

    def __init__(
        self,
        bucket_by: Callable[..., Hashable] | None,
        collate: Callable[[list[Call]], Call] | None,
        split: Callable[[Any, list[Call]], Sequence[Any]] | None,
    ) -> None:
        self._bucket_by, self._collate, self._split = bucket_by, collate, split

    def request(self, call: Call) -> Request:
        """Return a request with its key.

        Raises:
            ValueError: no tensor, no rows, or tensors that disagree on their rows.
        """
        made = Request(call)
        bucket = self._bucket_by(*call[0], **call[1]) if self._bucket_by else None
        leaf_key = key_of if self._collate is None else _loose_key_of
        made.key = (bucket, made.form, *map(leaf_key, made.leaves))
        return made

    def joined(self, requests: Sequence[Request], device: torch.device) -> Call:
        """Return the arguments of one call on ``device`` for requests of one key, ready for its current stream."""
        for request in requests:
            for source, event in request.ready:
                torch.accelerator.current_stream(source).wait_event(event)
        if self._collate is not None:
            joined = self._collate([each.call for each in requests])
            copies: Call = map_leaves(joined, lambda leaf: copy_aside(leaf, device) if _is_tensor(leaf) else leaf)
            hand_over(tensors_in(copies))
            return copies
        columns = zip(*[request.leaves for request in requests], strict=True)
        leaves = [_joined(column, device) if _is_tensor(column[0]) else column[0] for column in columns]
        call: Call = requests[0].tree.unflatten(iter(leaves))
        return call

    def split(self, outputs: Any, requests: Sequence[Request]) -> Sequence[Any]:
        """Return each request's part of the outputs.

        Raises:
            ValueError: a tensor whose first dimension is not the rows, with its path; or another number of parts than
                of requests.
        """
        if self._split is not None:
            parts = list(self._split(outputs, [each.call for each in requests]))
            if len(parts) != len(requests):
                raise ValueError(f"split returned {len(parts)} answers for {len(requests)} requests")
            return parts
        leaves: list[Any] = []
        tree = flatten(outputs, leaves, "outputs")
        rows = [request.own_rows for request in requests]
        for path, leaf in zip(tree.paths("outputs"), leaves, strict=True):
            if _is_tensor(leaf) and (not leaf.dim() or leaf.size(0) != sum(rows)):
                raise ValueError(
                    f"{path} has shape {tuple(leaf.shape)}, and no row for each of the {sum(rows)} rows of the inputs: "
                    "it cannot be split among requests"
                )
        columns = [leaf.split(rows) if _is_tensor(leaf) else [leaf] * len(rows) for leaf in leaves]
        return [tree.unflatten(iter([column[index] for column in columns])) for index in range(len(rows))]


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Begin a copy of a GPU's tensor into pinned memory, on the current stream; other tensors are copied at once."""
    if tensor.device.type != GPU_TYPE:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _joined(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the rows of all parts on the device: through one pinned copy if they are on the host."""
    if device.type == GPU_TYPE and all(part.device.type == "cpu" for part in parts):
        shape = (sum(part.size(0) for part in parts), *parts[0].shape[1:])
        pinned = torch.cat(list(parts), out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))
        parts = (pinned,)
    copies = [copy_aside(part, device) for part in parts]
    hand_over(copies)
    return copies[0] if len(copies) == 1 else torch.cat(copies)


def key_of(leaf: Any) -> Hashable:
    """Return a key of a leaf: dtype and row shape of a tensor, the value of anything else."""
    return (leaf.dtype, leaf.shape[1:]) if isinstance(leaf, torch.Tensor) else _loose_key_of(leaf)


def _loose_key_of(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), leaf
