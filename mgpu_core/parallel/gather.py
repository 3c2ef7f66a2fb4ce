"""Gather: one nested object per rank becomes one, its tensors joined along ``dim``.

The inverse of scatter, rule by rule: tensors are joined, equal leaves stay, unequal ones are an error that names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.comm import autograd
from mgpu_core.comm.facts import tell_backward, tell_cut
from mgpu_core.device.devices import DeviceLike, as_device
from mgpu_core.nested import Tree, flatten_alike
from mgpu_core.record import is_on, span

__all__ = ["gather"]


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Joins the ranks' outputs on ``target_device``; differentiable.

    Args:
        outputs: one object per rank, all of one structure.
        target_device: where the result is wanted: a device, ``"cpu"`` for the CPU (-1 works, with torch's warning).
        dim: the dimension along which tensors are joined; scalars become a vector for ``dim=0``.

    Returns:
        An object of the structure of ``outputs[0]``: tensors joined, in fresh memory; other leaves as they are.

    Raises:
        TypeError: leaves that are no tensors and differ between ranks, or a tensor beside something else.
        ValueError: outputs of different structure, or tensors that do not fit together.
    """
    device = as_device(target_device)
    if not len(outputs):
        raise ValueError("gather needs the output of at least one rank")
    with span("gather"):
        tree, rows = flatten_alike(outputs, "outputs")
        joined = [_join([row[place] for row in rows], device, dim, tree, place) for place in range(len(rows[0]))]
    return tree.unflatten(iter(joined))


def _join(leaves: list[Any], device: torch.device, dim: int, tree: Tree, place: int) -> Any:
    tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if tensors == len(leaves):
        return _join_tensors(leaves, device, dim, tree, place)
    other = next((rank for rank, leaf in enumerate(leaves) if rank and not _equal(leaves[0], leaf)), None)
    if other is None:
        return leaves[0]
    raise TypeError(
        f"{tree.paths('outputs')[place]} cannot be gathered: it is {_text(leaves[0])} on rank 0 and "
        f"{_text(leaves[other])} on rank {other}; only tensors are joined, everything else must be equal"
    )


def _join_tensors(leaves: list[torch.Tensor], device: torch.device, dim: int, tree: Tree, place: int) -> torch.Tensor:
    try:
        joined = autograd.gather(leaves, device, dim)
    except (ValueError, TypeError, IndexError) as error:
        error.add_note(f"while gathering {tree.paths('outputs')[place]} along dimension {dim}")
        raise
    if is_on():
        for rank, leaf in enumerate(leaves):
            tell_backward(rank, [leaf])
        tell_cut("gather", tree.paths("outputs")[place], device, leaves, dim)
    return joined


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if one is other:
        return True
    try:
        if getattr(one, "shape", None) != getattr(other, "shape", None):
            return False
        same = one == other
        if hasattr(same, "all"):  # an array of answers
            same = same.all()
        return type(one) is type(other) and (bool(same) or bool(one != one and other != other))
    except (TypeError, ValueError, RuntimeError):  # no one answer
        return False


def _text(leaf: Any) -> str:
    text = f"a {tuple(leaf.shape)} tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
    return text if len(text) <= 60 else text[:57] + "..."
