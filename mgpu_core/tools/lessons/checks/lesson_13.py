"""Lesson 13, tensor parallel: parts and sums in whole numbers, and one all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_RANKS = (1, 2, 3, 8)


def _counts(count: int, ranks: int) -> list[int]:
    return [part for _, part in _core.chunk_plan(count, ranks)]


def _numbers(*shape: int) -> torch.Tensor:
    """Return small whole numbers, of which some are negative."""
    return (torch.arange(torch.Size(shape).numel()) * 5 % 13 - 6).double().reshape(shape)


@asks_for("cut_linear")
def exercise_1(answer: Callable[..., Any]) -> None:
    """Check: the sizes and the direction of the cut, and the bias."""
    weight, bias = _numbers(9, 11), torch.arange(1.0, 10.0)
    for ranks in _RANKS:
        for kind, dim in (("column", 0), ("row", 1)):
            call = f"cut_linear(a (9, 11) weight, a bias of 9, {ranks}, {kind!r})"
            weights, biases = answer(weight, bias, ranks, kind)
            expect(f"{call}, the weights", weights, weight.split(_counts(weight.shape[dim], ranks), dim))
            parts = bias.split(_counts(9, ranks)) if kind == "column" else [bias] + [None] * (ranks - 1)
            expect(f"{call}, the biases", biases, parts)


@asks_for("cut_mlp")
def exercise_2(answer: Callable[..., Any]) -> None:
    """Check: the plain layers' output, and all that travels is one sum of one tensor per rank."""
    x, up, down, bias = _numbers(3, 4), _numbers(11, 4), _numbers(5, 11), torch.arange(1.0, 6.0).double()
    wanted = (x @ up.T).relu() @ down.T + bias
    for ranks in _RANKS:
        counts = _counts(11, ranks)
        call = f"cut_mlp(x, {ranks} ups, {ranks} downs, bias, all_reduce)"
        sent: list[int] = []

        def all_reduce(tensors: list[torch.Tensor], sent: list[int] = sent) -> torch.Tensor:
            sent.append(len(tensors))
            return torch.stack(tensors).sum(dim=0)

        got = answer(x, list(up.split(counts)), list(down.split(counts, 1)), bias, all_reduce)
        expect(call, got, wanted)
        if sent != [ranks]:
            raise WrongAnswer(f"{call}: all_reduce should be called once with {ranks} tensors; its calls had {sent}")


@asks_for("cut_lookup")
def exercise_3(answer: Callable[..., Any]) -> None:
    """Check: the rows of each rank's own tokens, and zeros for the others'."""
    table, tokens = _numbers(10, 2), torch.tensor([0, 9, 4, 4, 7, 1])
    for counts in ([10], [5, 5], [4, 3, 3], [1, 6, 3], [2, 2, 1, 1, 1, 1, 1, 1]):
        owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[tokens]
        wanted = [table[tokens] * (owner == rank)[:, None] for rank in range(len(counts))]
        got = answer(tokens, list(table.split(counts)))
        expect(f"cut_lookup({tokens.tolist()}, shards of {counts} rows)", got, wanted)
