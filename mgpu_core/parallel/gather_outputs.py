"""Gather: one nested object per rank becomes one, its tensors joined along ``dim``.

The inverse of scatter, rule by rule: tensors are joined, equal leaves stay, unequal ones are an error that names them.
Unknown containers, such as the caches of decoders, are joined as torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack

from mgpu_core.comm import autograd
from mgpu_core.comm.arguments import check_joined
from mgpu_core.comm.trace_hooks import trace_backward, trace_cut
from mgpu_core.devices.devices import DeviceLike, as_device
from mgpu_core.devices.traces import refuse_traces
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.support.warnings import warn_user
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span
from mgpu_core.trees.comparison import equal
from mgpu_core.trees.nested import LEAF, Rows, Tree, any_tensor, are_divisible, flatten, flatten_alike, moved

__all__ = ["Rule", "gather", "joined", "padded"]

Rule: TypeAlias = Callable[[list[Any], Callable[[], str]], Any]
"""Joins the leaves of one place, whose path the function returns, or returns ``NotImplemented``: gather's way."""


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Join the ranks' outputs on ``target_device``; differentiable.

    Args:
        outputs: one object per rank, all of one structure.
        target_device: where the result is wanted: a device, ``"cpu"`` for the CPU (-1 works, with torch's warning).
        dim: the dimension along which tensors are joined; scalars become a vector for ``dim=0``.

    Returns:
        An object of the structure of ``outputs[0]``: tensors joined, in fresh memory; other leaves as they are.

    Raises:
        TypeError: non-tensor leaves that differ between ranks, or a tensor on one rank and another type on another.
        ValueError: outputs of different structure, or tensors that do not fit together.
    """
    if _get_tracing_state() is not None or _len_torch_dispatch_stack():
        refuse_traces()
    device = as_device(target_device)
    if not len(outputs):
        raise ValueError("gather needs the output of at least one rank")
    with NULL_CONTEXT if tracer.sink is None else span("gather"):
        return _Join(device, dim).joined(outputs, "outputs")


def joined(outputs: Sequence[Any], device: torch.device, dim: int, rule: Rule) -> Any:
    """Join outputs on a device as :func:`gather`, except for leaves that the rule joins."""
    return _Join(device, dim, rule).joined(outputs, "outputs")


class _Join:
    """Where to, along which dimension, and a rule that goes before."""

    def __init__(self, device: torch.device, dim: int, rule: Rule | None = None) -> None:
        self._device, self._dim, self._rule = device, dim, rule

    def joined(self, outputs: Sequence[Any], name: str) -> Any:
        """Join one object per rank; ``name`` names them in errors."""
        if self._rule is None and are_divisible(outputs):
            return self._join_tensors(outputs, LEAF, 0, name)
        tree, rows = flatten_alike(outputs, name)
        columns = zip(*rows, strict=True)
        return tree.unflatten(iter([self._join(list(leaves), tree, i, name) for i, leaves in enumerate(columns)]))

    def _join(self, leaves: list[Any], tree: Tree, index: int, name: str) -> Any:
        if (
            self._rule is not None
            and (result := self._rule(leaves, lambda: tree.paths(name)[index])) is not NotImplemented
        ):
            return result
        tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if tensors == len(leaves):
            return self._join_tensors(leaves, tree, index, name)
        if all(isinstance(leaf, Rows) for leaf in leaves):
            return Rows(moved(each, self._device) for leaf in leaves for each in leaf)
        other = next((rank for rank, leaf in enumerate(leaves) if rank and not equal(leaves[0], leaf)), None)
        if other is None:
            return leaves[0]
        path = tree.paths(name)[index]
        items = [_items_of(leaf) for leaf in leaves]
        if not tensors and items[0] is not None and all(each is not None for each in items):
            return self._join_items(leaves, items, path)
        raise TypeError(
            f"{path} cannot be gathered: it is {_text(leaves[0])} on rank 0 and {_text(leaves[other])} on rank "
            f"{other}; only tensors are joined, everything else must be equal"
        )

    def _join_items(self, leaves: list[Any], items: list[Any], path: str) -> Any:
        """Join objects of an unknown class by its iterator and constructor, as torch does."""
        joined = self.joined(items, path)
        kind = type(leaves[0])
        try:
            gathered = kind(iter(joined))
        except Exception as error:
            raise TypeError(
                f"{path} cannot be gathered: it holds tensors, and {kind.__name__} cannot be made of what its own "
                "iterator gives; return the tensors, or nothing (use_cache=False)"
            ) from error
        if _has_items(gathered, joined):
            return gathered
        warn_user(
            f"{path} is a {kind.__name__}, which does not hold what it is made of: it was gathered as a list of its "
            "items. Return the tensors, or nothing (use_cache=False)"
        )
        return joined

    def _join_tensors(self, leaves: Sequence[torch.Tensor], tree: Tree, index: int, name: str) -> torch.Tensor:
        are_numbers = leaves[0].ndim == 0 and all(leaf.dim() == 0 for leaf in leaves)
        if are_numbers and self._dim == 0:
            warn_user(
                "Was asked to gather along dimension 0, but all "
                "input tensors were scalars; will instead unsqueeze "
                "and return a vector."
            )
            leaves = [leaf.reshape(1) for leaf in leaves]
        try:
            for leaf in leaves:
                leaf.size(self._dim)  # raises IndexError in torch's words
            dim = self._dim % leaves[0].ndim
            check_joined(leaves, dim, "tensors")
            joined = autograd.gather(leaves, self._device, dim)
        except (ValueError, TypeError, IndexError) as error:
            error.add_note(f"while gathering {tree.paths(name)[index]} along dimension {self._dim}")
            raise
        if tracer.recording is not None:
            for rank, leaf in enumerate(leaves):
                trace_backward(rank, [leaf])
            trace_cut("gather", tree.paths(name)[index], self._device, leaves, self._dim)
        return joined


def padded(outputs: Sequence[Any], dim: int, value: float | None) -> list[Any]:
    """Return the ranks' outputs with the tensors of one place as long as the longest of them, filled at their ends.

    Args:
        outputs: one object per rank, all of one structure.
        dim: the dimension of the rows, which is left as it is.
        value: to fill with; ``None``: no tensor may be shorter than another.

    Raises:
        ValueError: outputs of different structure; without a value, tensors of unequal lengths.
    """
    tree, rows = flatten_alike(outputs, "outputs")
    paths = tree.paths("outputs")
    columns = [_as_long(leaves, dim, value, path) for leaves, path in zip(zip(*rows, strict=True), paths, strict=True)]
    return [tree.unflatten(iter([column[rank] for column in columns])) for rank in range(len(outputs))]


def _as_long(leaves: Sequence[Any], dim: int, value: float | None, path: str) -> Sequence[Any]:
    """Return the leaves of one place on all ranks, made equally long if they are tensors."""
    if not all(isinstance(each, torch.Tensor) and each.ndim == leaves[0].ndim > 0 for each in leaves):
        return leaves
    dim %= leaves[0].ndim
    longest = [max(sizes) for sizes in zip(*(each.shape for each in leaves), strict=True)]
    missing = [[0 if i == dim else most - size for i, (most, size) in enumerate(zip(longest, leaf.shape, strict=True))]
               for leaf in leaves]  # fmt: skip
    if not any(map(any, missing)):
        return leaves
    if value is None:
        shapes = ", ".join(str(tuple(each.shape)) for each in leaves)
        raise ValueError(f"{path} has the shapes {shapes} on the ranks: pass pad_value=, to fill up the shorter")
    fills = [[part for each in reversed(ends) for part in (0, each)] for ends in missing]  # torch: the last one first
    return [torch.nn.functional.pad(each, ends, value=value) for each, ends in zip(leaves, fills, strict=True)]


def _items_of(obj: Any) -> list[Any] | None:
    """Return its items, if they hold tensors; ``None`` if not, or if it is not iterable."""
    if isinstance(obj, Set) or not isinstance(obj, Iterable):  # of sets nothing says which entries belong together
        return None
    try:
        if iter(obj) is obj:  # it would be used up
            return None
        items = list(obj)
        leaves: list[Any] = []
        flatten(items, leaves, "", whole=True)
    except Exception:  # whatever an iterator of somebody else's says
        return None
    return items if any_tensor(leaves) else None


def _has_items(obj: Any, joined: list[Any]) -> bool:
    """Return whether an object gives items of the structure and shapes of those that it was made of."""
    items = _items_of(obj)
    if items is None:
        return False
    leaves: tuple[list[Any], list[Any]] = ([], [])
    trees = [flatten(each, found, "", whole=True) for each, found in zip((items, joined), leaves, strict=True)]
    if trees[0].difference(trees[1], "") is not None:
        return False
    return all(getattr(one, "shape", None) == getattr(two, "shape", None) for one, two in zip(*leaves, strict=True))


def _text(leaf: Any) -> str:
    text = f"a {tuple(leaf.shape)} tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
    return text if len(text) <= 60 else text[:57] + "..."
