"""Lesson 4, gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect, shown

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_COUNTS = ([4], [3, 2], [2, 2], [3, 2, 2], [0, 4, 1], [2, 0], [2, 2, 2, 2, 2, 2, 2, 1])


@asks_for("adjoint_of_gather")
def exercise_1(answer: Callable[[torch.Tensor, list[int]], Any]) -> None:
    """Check: rows in the counts of the forward, not in even ones; and it is the adjoint."""
    for counts in _COUNTS:
        grad = torch.arange(3.0 * sum(counts)).reshape(-1, 3)
        parts = [torch.ones(count, 3, requires_grad=True) for count in counts]
        torch.cat(parts).backward(grad)
        wanted = [part.grad for part in parts]
        expect(f"adjoint_of_gather(a {tuple(grad.shape)} tensor, {counts})", answer(grad, list(counts)), wanted)


@asks_for("team_mean")
def exercise_2(answer: Callable[[list[torch.Tensor], list[int]], Any]) -> None:
    """Check: the mean over rows, with one device's gradients."""
    for counts in _COUNTS:
        rows = torch.arange(1.0, 1 + sum(counts), dtype=torch.float64)
        means = [part.mean().requires_grad_() for part in rows.split(counts)]
        call = f"team_mean(means={[round(mean.item(), 3) for mean in means]}, rows={counts})"
        got = answer(list(means), list(counts))
        _expect_near(call, got, rows.mean())
        _check_graph(call, got)
        got.backward()
        for rank, count in enumerate(counts):
            if count:
                gradient = torch.tensor(count / sum(counts), dtype=torch.float64)
                _expect_near(f"{call}, the gradient of means[{rank}]", means[rank].grad, gradient)


@asks_for("team_cross_entropy")
def exercise_3(answer: Callable[[list[torch.Tensor], list[torch.Tensor]], Any]) -> None:
    """Check: one device's value and gradient, with ignored labels in unequal numbers."""
    generator = torch.Generator().manual_seed(4)
    for counts in _COUNTS:
        for ignored in ([], [0], list(range(counts[0])), list(range(counts[0], sum(counts)))):
            logits = torch.randn(sum(counts), 5, generator=generator, dtype=torch.float64, requires_grad=True)
            labels = torch.arange(sum(counts)) % 5
            labels[ignored] = -100
            if bool((labels == -100).all()):
                continue
            _check_loss(answer, logits, labels, counts)


def _check_loss(answer: Callable[..., Any], logits: torch.Tensor, labels: torch.Tensor, counts: Sequence[int]) -> None:
    pieces = list(labels.split(list(counts)))
    call = f"team_cross_entropy(logits, labels={[piece.tolist() for piece in pieces]})"
    wanted = cross_entropy(logits, labels)
    got = answer(list(logits.split(list(counts))), pieces)
    _expect_near(call, got, wanted)
    _check_graph(call, got)
    (gradient,) = torch.autograd.grad(wanted, logits)
    (of_logits,) = torch.autograd.grad(got, logits)
    _expect_near(f"{call}, the gradient of the logits", of_logits, gradient)


def _check_graph(call: str, got: torch.Tensor) -> None:
    if not got.requires_grad:
        raise WrongAnswer(f"{call}: the result has no history, so no gradient can come back")


def _expect_near(call: str, got: object, wanted: torch.Tensor) -> None:
    """Within rounding: a division may come before or after a sum."""
    if not isinstance(got, torch.Tensor):
        raise WrongAnswer(f"{call}: expected a tensor, got {shown(got)}")
    if got.shape != wanted.shape or not torch.allclose(got.double(), wanted, rtol=1e-9, atol=1e-12):
        raise WrongAnswer(f"{call}: expected {shown(wanted.detach())}, got {shown(got.detach())}")
