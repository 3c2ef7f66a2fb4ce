"""Leaves that are not cut: a single rank gets them as they are, each of several ranks gets a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core.comm import autograd, dispatch
from mgpu_core.comm.trace_hooks import trace_cut
from mgpu_core.devices.tensor_checks import refuse_special
from mgpu_core.ranks.team import Team
from mgpu_core.trace.tracer import when_tracing
from mgpu_core.trees.nested import Replicate, Rows, any_tensor, flatten, is_undivided

__all__ = ["copies_for_all", "copies_of_tensor", "trace_replicated"]


@when_tracing
def trace_replicated(objects: dict[str, Any], device: torch.device, dim: int) -> None:
    """Tell a recording which tensors the only rank gets."""
    for name, obj in objects.items():
        leaves: list[Any] = []
        tree = flatten(obj, leaves, name, whole=True, share=True)
        for path, leaf in zip(tree.paths(name), leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and not is_undivided(leaf) and leaf.dim() > dim >= -leaf.dim():
                trace_cut("scatter", path, leaf.device, [leaf], dim, "whole" if leaf.device == device else "copy")


def copies_for_all(obj: Any, team: Team) -> list[Any]:
    """Return the nest whole for every rank: its tensors copied, the rest by reference."""
    leaves: list[Any] = []
    tree = flatten(obj, leaves, "Replicate", whole=True, share=True)
    if not any_tensor(leaves):
        return [obj] * len(team)
    columns = [_copies_of_leaf(leaf, team) for leaf in leaves]
    return [tree.unflatten(iter([column[rank] for column in columns])) for rank in team.ranks]


def _copies_of_leaf(leaf: Any, team: Team) -> Sequence[Any]:
    if isinstance(leaf, Replicate):  # one in another says nothing new, but the module gets bare values
        return copies_for_all(leaf.value, team)
    if isinstance(leaf, Rows):
        return copies_for_all(list(leaf), team)
    if isinstance(leaf, PackedSequence):
        return _copies_of_packed(leaf, team)
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(team)
    if leaf.is_nested:
        raise TypeError("Replicate(...) holds a nested tensor, which is not one block of memory to copy")
    return copies_of_tensor(leaf, team)


def _copies_of_packed(packed: PackedSequence, team: Team) -> list[PackedSequence]:
    """Return copies of a packed sequence; its sizes stay on the host, where torch needs them."""
    parts = packed.data, packed.sorted_indices, packed.unsorted_indices
    columns = [[None] * len(team) if part is None else copies_of_tensor(part, team) for part in parts]
    return [PackedSequence(data, packed.batch_sizes.clone(), *order) for data, *order in zip(*columns, strict=True)]


def copies_of_tensor(tensor: torch.Tensor, team: Team) -> Sequence[torch.Tensor]:
    """Copy into fresh memory on every rank, rank 0 too, since a forward may write to its inputs.  Differentiable."""
    if tensor.requires_grad and torch.is_grad_enabled():
        copies = [row[0] for row in autograd.broadcast_buckets(team.devices, [tensor], numbered=False)]
    else:
        refuse_special(tensor, "Replicate(...)", sparse=True)
        copies = dispatch.broadcast([tensor], team.devices)[0]
    if team.devices[0] == tensor.device:
        copies[0] = copies[0].clone()
    return copies
