"""Lesson 10, the gallery of bugs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect, expect_raises

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_NAN = float("nan")


@asks_for("batch_loss")
def exercise_1(answer: Callable[[list[float], list[int]], Any]) -> None:
    """Check: unequal ranks, ranks without rows, one rank; whole numbers throughout."""
    batches = [
        ([0.0, 7.5], [3, 2], 3.0),
        ([2.0, _NAN], [4, 0], 2.0),
        ([5.0], [7], 5.0),
        ([4.0, 4.0, 1.0], [1, 1, 1], 3.0),
        ([8.0, 0.0, 0.0, _NAN, 0.0, 0.0, 0.0, 0.0], [2, 1, 1, 0, 1, 1, 1, 1], 2.0),
    ]
    for losses, rows, wanted in batches:
        expect(f"batch_loss({losses}, {rows})", answer(list(losses), list(rows)), wanted)


@asks_for("sum_gradients")
def exercise_2(answer: Callable[[Sequence[Sequence[torch.Tensor | None]]], Any]) -> None:
    """On 1, 2, 3 and 8 ranks: one parameter that all use, one that no rank uses, one that only the last rank uses."""
    for ranks in (2, 1, 3, 8):
        columns = [[torch.full((2,), rank + 1.0), None, None] for rank in range(ranks)]
        columns[-1][2] = torch.tensor([5.0, 6.0])
        _check_sums(answer, columns, ranks)


def _check_sums(
    answer: Callable[[Sequence[Sequence[torch.Tensor | None]]], Any], columns: list[list[Any]], ranks: int
) -> None:
    before = [[None if each is None else each.clone() for each in column] for column in columns]
    call = f"sum_gradients of {ranks} ranks and 3 parameters"
    sums = answer(columns)
    if not isinstance(sums, list) or len(sums) != 3:
        raise WrongAnswer(f"{call}: expected a list of 3, got {sums!r}")
    expect(f"{call}: no rank has a gradient of parameter 1", sums[1], None)
    for rank, (column, original) in enumerate(zip(columns, before, strict=True)):
        for tensor, was in zip(column, original, strict=True):
            if was is not None and not torch.equal(tensor, was):
                raise WrongAnswer(f"{call}: the gradients of rank {rank} have changed")
    expect(f"{call}: parameter 0", sums[0], torch.full((2,), ranks * (ranks + 1) / 2))
    expect(f"{call}: parameter 2", sums[2], torch.tensor([5.0, 6.0]))
    for total in sums:
        if total is not None:
            total.add_(1)
    for column, original in zip(columns, before, strict=True):
        if any(was is not None and not torch.equal(each, was) for each, was in zip(column, original, strict=True)):
            raise WrongAnswer(f"{call}: a write into a sum changes a gradient; a sum should be a fresh tensor")


@asks_for("call_in_thread")
def exercise_3(answer: Callable[[Callable[[], Any]], Any]) -> None:
    """Check: another thread, the same modes, the same end."""
    here, before = threading.get_ident(), set(threading.enumerate())
    if answer(threading.get_ident) == here:
        raise WrongAnswer("call_in_thread(get_ident): it ran in the caller's thread")
    answer(partial(time.sleep, 0.1))
    if set(threading.enumerate()) - before:
        raise WrongAnswer("call_in_thread: a thread is still there when it has returned")
    square = torch.ones(2, 2, requires_grad=True)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            expect(f"under autocast in {dtype}, a product", answer(lambda: (square @ square).dtype), dtype)
    expect("without autocast, a product", answer(lambda: (square @ square).dtype), torch.float32)
    with torch.no_grad():
        expect("under no_grad, requires_grad of a product", answer(lambda: (square @ square).requires_grad), False)
    expect("with gradients, requires_grad of a product", answer(lambda: (square @ square).requires_grad), True)
    failure = KeyError("of the function")
    call = "call_in_thread(a function that raises KeyError)"
    expect(call, expect_raises(call, KeyError, lambda: answer(partial(_fail, failure))), failure)


def _fail(error: Exception) -> None:
    raise error
