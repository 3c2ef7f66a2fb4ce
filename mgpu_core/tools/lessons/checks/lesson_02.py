"""Lesson 2, replicate."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_PLANS: tuple[tuple[list[int], list[int], int], ...] = (
    ([4, 4, 4], [0, 0, 0], 8),
    ([4, 9, 4], [0, 0, 0], 8),
    ([9, 4, 4], [0, 0, 0], 8),
    ([4, 4, 4], [0, 1, 0], 100),
    ([8, 0, 1], [0, 0, 0], 8),
    ([], [], 8),
)


@asks_for("bucket_positions")
def exercise_1(answer: Callable[[list[int], list[int], int], Any]) -> None:
    """Check the core's plan."""
    chance = random.Random(1)
    plans = [*_PLANS]
    for _ in range(200):
        nbytes = [chance.randrange(20) for _ in range(chance.randrange(1, 9))]
        plans.append((nbytes, [chance.randrange(2) for _ in nbytes], chance.randrange(1, 30)))
    for nbytes, kinds, limit in plans:
        wanted = _core.bucket_plan(nbytes, kinds, limit)
        expect(f"bucket_positions({nbytes}, {kinds}, {limit})", answer(list(nbytes), list(kinds), limit), wanted)


@asks_for("differentiable_copies")
def exercise_2(answer: Callable[[torch.Tensor, int], Any]) -> None:
    """Check: fresh memory, and summed gradients."""
    for ranks in (1, 2, 3, 8):
        tensor = torch.arange(4.0).requires_grad_()
        call = f"differentiable_copies(tensor, {ranks})"
        copies = list(answer(tensor, ranks))
        expect(call, copies, [tensor] * ranks)
        _check_memory(call, tensor, copies)
        _check_gradient(call, tensor, copies, list(range(ranks)))
        _check_gradient(call, tensor, list(answer(tensor, ranks)), [ranks - 1])


def _check_memory(call: str, tensor: torch.Tensor, copies: Sequence[torch.Tensor]) -> None:
    addresses = [each.untyped_storage()._cdata for each in (tensor, *copies)]
    if len(set(addresses)) <= len(copies):
        raise WrongAnswer(f"{call}: two of the copies and the tensor share their memory")


def _check_gradient(call: str, tensor: torch.Tensor, copies: Sequence[torch.Tensor], used: Sequence[int]) -> None:
    """Check: rank r multiplies by r + 1, so the gradient is the sum of these numbers."""
    total = sum((copies[rank].sum() * (rank + 1) for rank in used), torch.zeros(()))
    if not total.requires_grad:
        raise WrongAnswer(f"{call}: the copies have no history, so no gradient can come back")
    tensor.grad = None
    total.backward()
    factor = float(sum(rank + 1 for rank in used))
    expect(f"{call}, the tensor's gradient with ranks {list(used)} used", tensor.grad, torch.full((4,), factor))


@asks_for("refresh")
def exercise_3(answer: Callable[[list[torch.nn.Module], torch.nn.Module], Any]) -> None:
    """Check: parameters and all buffers, in place, in memory of their own; nothing is recorded by autograd."""
    for ranks in (1, 2, 3, 8):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        net[1].register_buffer("mask", torch.zeros(2), persistent=False)  # in no state_dict
        replicas = [copy.deepcopy(net) for _ in range(ranks)]
        held = [_tensors(replica) for replica in replicas]
        _fill(net, 5)
        wanted = {name: value.clone() for name, value in _tensors(net).items()}
        answer(list(replicas), net)
        for rank, replica in enumerate(replicas):
            where = f"refresh({ranks} replicas, net), rank {rank}"
            expect(where, _tensors(replica), wanted)
            if any(not each.is_leaf for each in replica.parameters()):
                raise WrongAnswer(f"{where}: a parameter is no leaf any more: write under torch.no_grad()")
        _fill(net, 9)
        for rank, replica in enumerate(replicas):
            where = f"refresh({ranks} replicas, net), rank {rank}"
            expect(f"{where}, after a later write into the net", _tensors(replica), wanted)
            expect(f"{where}, tensors that were held before", held[rank], wanted)


def _tensors(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors by name, detached."""
    return {name: tensor.detach() for name, tensor in (*net.named_parameters(), *net.named_buffers())}


def _fill(net: torch.nn.Module, first: int) -> None:
    for number, tensor in enumerate(_tensors(net).values()):
        tensor.fill_(first + number)
