"""Requests and batches: how the arguments of several calls become those of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from itertools import chain
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch.nn import Module

from mgpu_core.devices.streams import GPU_TYPE
from mgpu_core.devices.transfer import copy_aside, hand_over
from mgpu_core.parallel.scatter_inputs import row_counts
from mgpu_core.parallel.scatter_inputs.cut import Arguments
from mgpu_core.trees.containers import opened
from mgpu_core.trees.nested import (
    RankParts,
    Replicate,
    Rows,
    Tree,
    flatten,
    is_undivided,
    map_leaves,
    moved,
    tensors_in,
)

__all__ = ["Call", "Joiner", "Request", "ServingModule", "copied_to_host", "form_of", "key_of"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""


class ServingModule(Module):
    """A module that says how its requests are joined; a :class:`mgpu_core.Predictor` calls its methods.

    Attributes:
        model: the module that answers.
    """

    model: Any

    def encode(self, call: Call, future: Future[Any]) -> Call:
        """Return the call to queue in place of the user's, in the user's thread; the future gets the answer."""
        raise NotImplementedError

    def bucket_by(self, *args: Any, **kwargs: Any) -> Hashable:
        """As the argument of the Predictor."""
        raise NotImplementedError

    def collate(self, calls: list[Call]) -> Call:
        """As the argument of the Predictor."""
        raise NotImplementedError

    def split(self, outputs: Any, calls: list[Call]) -> Sequence[Any]:
        """As the argument of the Predictor; an exception in place of an answer fails this request alone."""
        raise NotImplementedError


def form_of(tree: Tree) -> Hashable:
    """Return a key of the structure: equal for nests that differ in their leaves alone."""
    return tree.kind, tree.names, tuple(map(form_of, tree.children))


class Request:
    """The arguments of one call, and the future that gets its outputs.

    Tensors and :class:`mgpu_core.Rows` have the rows, as for :func:`mgpu_core.scatter`; tensors without dimensions,
    :class:`mgpu_core.Replicate` and all else belong to every row.

    Attributes:
        call: the arguments.
        future: of the outputs.
        key: requests with equal keys can be joined.
        rows: of a batch that it takes; all of them where it must not be joined.
        own_rows: of its arguments, 1 or more.
        has_only_rows: all its tensors have the rows.
        device: of its first tensor.
        ready: per accelerator of its tensors, an event after the work that makes them.
        begin: when it was made, seconds of ``time.perf_counter``.
    """

    __slots__ = (
        *("_arguments", "begin", "call", "device", "future", "has_only_rows"),
        *("key", "leaves", "own_rows", "ready", "rows"),
    )

    def __init__(self, call: Call, future: Future[Any] | None = None) -> None:
        self.call = call
        self.future: Future[Any] = future or Future()
        args, kwargs = call
        self._arguments: Arguments | None = None  # a tensor alone is no nest to walk
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and not is_undivided(args[0]):
            self.leaves: list[Any] = [args[0]]
            tensors, self.has_only_rows = self.leaves, True
            rows = args[0].size(0) if args[0].dim() else None
        else:
            self._arguments = Arguments({"inputs": args, "kwargs": kwargs})
            self.leaves = self._arguments.leaves
            self.leaves[:] = [leaf.joined() if isinstance(leaf, RankParts) else leaf for leaf in self.leaves]
            tensors = list(chain.from_iterable(map(_tensors_of, self.leaves)))
            self.has_only_rows = all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in _divided(self.leaves))
            rows = self._arguments.rows(0)
        if not rows:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
            raise ValueError(f"a request needs tensors or Rows with 1 or more rows along dimension 0: {shapes}")
        self.rows = self.own_rows = rows
        self.device = tensors[0].device if tensors else _HOST
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self.ready = [(each, torch.accelerator.current_stream(each).record_event()) for each in devices]
        self.key: Hashable = None
        self.begin = time.perf_counter()

    @property
    def structure(self) -> Hashable:
        """A key of the nests: equal for calls that differ in their leaves alone."""
        return None if self._arguments is None else tuple(map(form_of, self._arguments.trees))

    @property
    def form(self) -> Hashable:
        """A key of what decides the structure of the outputs: that of the arguments, without the sizes of tensors."""
        return (self.structure, *map(_form_of_leaf, self.leaves))

    @property
    def branch(self) -> Hashable:
        """A key that may decide which code a call runs: the form, without its numbers."""
        plain = str | bool | None
        return (self.structure, *((type(each), each if isinstance(each, plain) else None) for each in self.leaves))

    def rebuilt(self, leaves: list[Any]) -> Call:
        """Return a call of the same structure with other leaves."""
        if self._arguments is None:
            return tuple(leaves), {}
        args, kwargs = self._arguments.rebuild(leaves)
        return args, kwargs

    def chunks(self, count: int) -> list[Call]:
        """Return the calls of ``count`` parts of nearly equal numbers of rows, cut as scatter does it."""
        arguments = self._arguments or Arguments({"inputs": self.call[0], "kwargs": {}})
        return [(args, kwargs) for args, kwargs in arguments.slices(row_counts(self.own_rows, count, None), 0)]


_HOST = torch.device("cpu")


def _divided(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves that have rows, or hold tensors of every row."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | Rows | Replicate)]


def _tensors_of(leaf: Any) -> list[torch.Tensor]:
    if isinstance(leaf, Replicate):
        return tensors_in(leaf.value)
    return tensors_in(list(leaf)) if isinstance(leaf, Rows) else tensors_in(leaf)


class Joiner:
    """How requests become a batch.

    Args:
        bucket_by: a function of the arguments of a call; calls with unequal results are not joined.
        collate: a function of a list of calls, all of one bucket, that returns the joined call; ``None``: tensors and
            :class:`mgpu_core.Rows` are joined along dimension 0.
        encode: a function of a call and the future of its answer that returns the call to answer; ``None``: the same.
    """

    def __init__(
        self,
        bucket_by: Callable[..., Hashable] | None,
        collate: Callable[[list[Call]], Call] | None,
        encode: Callable[[Call, Future[Any]], Call] | None = None,
    ) -> None:
        self._bucket_by, self._collate, self._encode = bucket_by, collate, encode

    def request(self, call: Call) -> Request:
        """Return a request with its key.

        Raises:
            ValueError: no rows, or arguments that disagree on their number.
        """
        future: Future[Any] = Future()
        if self._encode is not None:
            call = self._encode(call, future)
        request = Request(call, future)
        bucket = self._bucket_by(*call[0], **call[1]) if self._bucket_by else None
        leaf_key = key_of if self._collate is None else _loose_key_of
        request.key = (bucket, request.structure, *map(leaf_key, request.leaves))
        return request

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
        return requests[0].rebuilt([_joined(column, device) for column in columns])


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Begin a copy of a GPU's tensor into pinned memory, on the current stream; other tensors are copied at once."""
    if tensor.device.type != GPU_TYPE:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _joined(parts: Sequence[Any], device: torch.device) -> Any:
    """Return the rows of all parts on the device; of leaves that belong to every row, the first."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return _joined_tensors(parts, device)
    return moved(Rows(chain.from_iterable(parts)) if isinstance(first, Rows) else first, device)


def _joined_tensors(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the rows of all parts on the device: through one pinned copy if they are on the host."""
    if device.type == GPU_TYPE and all(part.device.type == "cpu" for part in parts):
        shape = (sum(part.size(0) for part in parts), *parts[0].shape[1:])
        pinned = torch.cat(list(parts), out=torch.empty(shape, dtype=parts[0].dtype, device=_HOST, pin_memory=True))
        parts = (pinned,)
    copies = [copy_aside(part, device) for part in parts]
    hand_over(copies)
    return copies[0] if len(copies) == 1 else torch.cat(copies)


def key_of(leaf: Any) -> Hashable:
    """Return a key of a leaf, equal for leaves that can be joined.

    The dtype and row shape of a tensor, the class of :class:`mgpu_core.Rows`, the identity of tensors that belong to
    every row, the value of anything else.
    """
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, leaf.shape[1:]) if leaf.dim() else id(leaf)
    if isinstance(leaf, Replicate):
        return Replicate, id(leaf.value)
    return Rows if isinstance(leaf, Rows) else _key_of_value(leaf)


def _loose_key_of(leaf: Any) -> Hashable:
    """Return a key of a leaf as :func:`key_of`, but of a tensor its dtype alone."""
    return leaf.dtype if isinstance(leaf, torch.Tensor) else key_of(leaf)


def _form_of_leaf(leaf: Any) -> Hashable:
    """Return a key of a leaf without sizes and identities."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim()
    try:
        hash(leaf)
    except TypeError:
        return (type(leaf),)
    return type(leaf), None if isinstance(leaf, Replicate) else leaf


def _key_of_value(leaf: Any) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        if opened(leaf) is None:
            return type(leaf), id(leaf)
        leaves: list[Any] = []
        tree = flatten(leaf, leaves, "inputs", whole=True)
        return form_of(tree), *map(_key_of_value, leaves)
    parameters = getattr(leaf, "__dataclass_params__", None)
    is_plain = isinstance(leaf, str | MethodType) or getattr(parameters, "frozen", False)
    may_change = hasattr(leaf, "__dict__") and not is_plain  # and its hash, in the queue
    return type(leaf), id(leaf) if may_change else leaf
