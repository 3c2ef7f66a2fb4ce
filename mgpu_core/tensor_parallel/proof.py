"""Is a plan right?  Each block of cut layers is compared once with the same block uncut, on random rows.

A block is the smallest module around a layer whose outputs are summed and the layers before it that are cut: its
arguments and outputs are whole.  Its code may count heads, or mix features that lie in different ranks'
parts; all shapes fit then, and the numbers are others.  The first call shows the arguments of a block::

    call ── arguments of each block ── random rows of these shapes ─┬─ uncut block, on the first device ─┬─ alike?
                                                                    └─ cut block, in all ranks ──────────┘

One position alone, or positions that are alike, would prove nothing: attention is then the same however heads are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.devices.transfer import to_device
from mgpu_core.tensor_parallel.objects import PLAIN
from mgpu_core.tensor_parallel.plan import ShardPlan
from mgpu_core.trees.comparison import any_in_half, difference
from mgpu_core.trees.nested import map_leaves, tensors_in

__all__ = ["Proof", "arguments"]

_BOUND, _BOUND_IN_HALF = 1e-3, 5e-2  # parts of the largest value
_ATTEMPTS = 3  # of a block that cannot run alone
_POSITIONS = 3  # in place of one


class _RandomRows:
    """A tensor of a call in whose place random numbers go: its shape and dtype, on meta, and its device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.like, self.device = torch.empty_like(tensor, device="meta"), tensor.device


class Proof:
    """The blocks of a module that are still to be compared.

    Args:
        net: the module.
        plan: how it is cut.
    """

    def __init__(self, net: Module, plan: ShardPlan) -> None:
        self._left = dict.fromkeys(_blocks(net, plan), _ATTEMPTS)

    @property
    def is_open(self) -> bool:
        """Return whether blocks are left."""
        return bool(self._left)

    @contextmanager
    def seen(self, nets: Sequence[Module]) -> Iterator[list[dict[str, Any]]]:
        """Yield per rank the arguments of the first calls inside of blocks that are left, by their names."""
        calls: list[dict[str, Any]] = [{} for _ in nets]
        handles = [
            net.get_submodule(name).register_forward_pre_hook(partial(_note, of_rank, name), with_kwargs=True)
            for net, of_rank in zip(nets, calls, strict=True)
            for name in self._left
        ]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()

    def tried(self, name: str) -> None:
        """Note that a block could not be compared; it is not tried for ever."""
        self._left[name] -= 1
        if not self._left[name]:
            del self._left[name]

    def judge(self, name: str, block: Module, outputs: tuple[Any, Any], again: Callable[[], Any]) -> str | None:
        """Return how the first tensor of a cut block's outputs differs from the uncut one's; ``None``: it does not.

        Args:
            name: of the block.
            block: the uncut one.
            outputs: of the uncut and of the cut one.
            again: returns those of the uncut one again.
        """
        pairs = zip(*map(tensors_in, outputs), strict=False)
        pair = next((each for each in pairs if each[0].is_floating_point() and each[0].shape == each[1].shape), None)
        if pair is None or not pair[0].numel() or not pair[0].isfinite().all():
            self.tried(name)
            return None
        half = any_in_half(pair) or any_in_half(block.parameters())
        distance, scale = float((pair[1] - pair[0]).abs().max()), float(pair[0].abs().max())
        is_alike = distance <= (_BOUND_IN_HALF if half else _BOUND) * scale
        if is_alike or difference(outputs[0], again(), half=half) is not None:  # random numbers are not judged
            del self._left[name]
            return None
        return (
            f"{name or 'the module'} ({type(block).__name__}) gives other outputs cut by this plan than uncut: they "
            f"differ by {distance:.3g}, of values up to {scale:.3g}. Its code may count heads, or mix features of "
            "different ranks' parts: leave its layers out of the plan. tp.uncut() is the module alone"
        )


def arguments(seen: Any) -> tuple[Any, Any] | None:
    """Return arguments for a block of those that were seen: random rows of several positions, empty objects.

    The same in each call, for each device.  ``None``: tokens that are alike, which prove nothing.
    """
    args, kwargs = seen
    tensors = [each.like if isinstance(each, _RandomRows) else each for each in _leaves(seen)]
    rows = next((each for each in tensors if each.is_floating_point()), tensors[0] if tensors else None)
    if rows is None or not rows.ndim:
        return None
    dim = 1 if rows.ndim > 2 or not rows.is_floating_point() else 0
    is_one = rows.ndim > dim and rows.size(dim) == 1 and rows.numel() == rows.size(0) * rows.size(-1)
    if not rows.is_floating_point() and (is_one or bool((rows == rows.flatten()[0]).all())):
        return None
    if is_one:
        kwargs = {name: None if "mask" in name else each for name, each in kwargs.items()}
    generator = torch.Generator("cpu").manual_seed(0)

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, _RandomRows | torch.Tensor):
            return leaf if isinstance(leaf, PLAIN) or callable(leaf) else _empty(leaf)
        like = leaf.like if isinstance(leaf, _RandomRows) else leaf
        times = _POSITIONS if is_one and like.ndim > dim and like.size(dim) == 1 else 1
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().repeat_interleave(times, dim) if times > 1 else leaf.detach().clone()
        shape = [size * (times if at == dim else 1) for at, size in enumerate(like.shape)]
        return to_device(torch.randn(shape, generator=generator, device="cpu"), leaf.device, like.dtype)

    args, kwargs = map_leaves((args, kwargs), filled)
    return args, kwargs


def _leaves(seen: Any) -> list[Any]:
    leaves: list[Any] = []
    map_leaves(seen, lambda leaf: leaves.append(leaf) if isinstance(leaf, _RandomRows | torch.Tensor) else None)
    return leaves


def _note(calls: dict[str, Any], name: str, _: Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Keep the arguments of a block's first call; of its first tensor of real numbers the shape alone."""
    if name in calls:
        return
    has_rows = False

    def kept(leaf: Any) -> Any:
        nonlocal has_rows
        if has_rows or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        has_rows = True
        return _RandomRows(leaf)

    calls[name] = map_leaves((args, dict(kwargs)), kept)


def _empty(leaf: Any) -> Any:
    """Return a new object of a class, such as an empty cache; ``None`` where it takes more to make one."""
    try:
        return type(leaf)()
    except Exception:
        return None


def _blocks(net: Module, plan: ShardPlan) -> list[str]:
    """Return the names of the smallest modules with a layer whose outputs are summed, and the cut ones before it."""
    paths = []
    columns = [name for name, word in plan.layers.items() if word in ("column", "packed_column")]
    columns += [name for name in plan.cuts if name.rpartition(".")[0] not in plan.layers]
    for name, word in plan.layers.items():
        path = name
        if word == "row":
            path = path.rpartition(".")[0]
            while path and not (_is_called(net, path) and any(each.startswith(f"{path}.") for each in columns)):
                path = path.rpartition(".")[0]
        elif word != "moe_tp_experts":
            continue
        if path not in paths:
            paths.append(path)
    return paths


def _is_called(net: Module, name: str) -> bool:
    """Return whether a module has a forward of its own, which lists of modules have not."""
    return type(net.get_submodule(name)).forward is not Module.forward
