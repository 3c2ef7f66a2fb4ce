"""Lesson 1, scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect, expect_raises

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_ROWS = (9, 10, 64, 3, 8, 1, 0, 17)
_RANKS = (8, 4, 1, 2, 3)


def _counts(rows: int, ranks: int) -> list[int]:
    return [count for _, count in _core.chunk_plan(rows, ranks)]


@asks_for("chunk_counts")
def exercise_1(answer: Callable[[int, int], Any]) -> None:
    """Check: even counts, for every number of rows."""
    for rows in _ROWS:
        for ranks in _RANKS:
            expect(f"chunk_counts({rows}, {ranks})", answer(rows, ranks), _counts(rows, ranks))


@asks_for("scatter_rows")
def exercise_2(answer: Callable[..., Any]) -> None:
    """Check: equal parts along both dimensions, contiguous, in memory of their own; along the first one by default."""
    for dim in (0, 1, -1):
        for rows in _ROWS:
            for ranks in _RANKS:
                _check_cut(answer, rows, ranks, dim)
    tensor = torch.arange(12).reshape(4, 3)
    expect("scatter_rows(a (4, 3) tensor, 2)", answer(tensor, 2), [tensor[:2], tensor[2:]])


def _check_cut(answer: Callable[..., Any], rows: int, ranks: int, dim: int) -> None:
    tensor = torch.arange(rows * 3).reshape((rows, 3) if dim == 0 else (3, rows))
    before = tensor.clone()
    call = f"scatter_rows(a {tuple(tensor.shape)} tensor, {ranks}, {dim})"
    parts = answer(tensor, ranks, dim)
    expect(call, parts, list(torch.split(tensor, [count for count in _counts(rows, ranks) if count] or [0], dim)))
    for rank, part in enumerate(parts):
        if not part.is_contiguous():
            raise WrongAnswer(f"{call}: the part of rank {rank} is not contiguous, its strides are {part.stride()}")
        part.fill_(-1)
        if not torch.equal(tensor, before):
            raise WrongAnswer(f"{call}: a write into the part of rank {rank} changes the tensor: it is a view of it")
    addresses = [part.untyped_storage()._cdata for part in parts]
    if len(set(addresses)) < len(addresses):
        raise WrongAnswer(
            f"{call}: each of the {len(addresses)} parts should have memory of its own, and they are views of "
            f"{len(set(addresses))}: a part that is kept keeps the memory of the others"
        )


@asks_for("scatter_batch")
def exercise_3(answer: Callable[[dict[str, object], int], Any]) -> None:
    """Check: whole dictionaries, one per rank that works; a disagreement is told."""
    for rows, ranks in ((9, 4), (9, 8), (3, 8), (2, 1), (7, 2), (5, 3)):
        _check_batch(answer, rows, ranks)
    for pixels, labels, weights in ((6, 5, 5), (6, 5, 6), (5, 6, 6), (6, 6, 5)):
        _check_disagreement(answer, {"pixels": pixels, "labels": labels, "weights": weights})


def _check_disagreement(answer: Callable[[dict[str, object], int], Any], rows: dict[str, int]) -> None:
    """Check: the keys are words that no error says by chance."""
    batch: dict[str, object] = {"name": "odd", **{key: torch.zeros(count, 2) for key, count in rows.items()}}
    call = f"scatter_batch({{'name': 'odd', {', '.join(f'{key!r}: {rows[key]} rows' for key in rows)}}}, 2)"
    text = str(expect_raises(call, ValueError, lambda: answer(batch, 2)))
    if len({count for key, count in rows.items() if key in text}) < 2:
        raise WrongAnswer(f"{call}: the ValueError should name the keys of two that disagree, and says {text!r}")


def _check_batch(answer: Callable[[dict[str, object], int], Any], rows: int, ranks: int) -> None:
    shared = ["the same list for all"]
    x, y, scale = torch.arange(rows * 2).reshape(rows, 2), torch.arange(rows) + 100, torch.tensor(5)
    call = f"scatter_batch({{'words': a list, 'x': {rows} rows, 'scale': 0-d, 'y': {rows} rows}}, {ranks})"
    parts = answer({"words": shared, "x": x, "scale": scale, "y": y}, ranks)
    counts = [count for count in _counts(rows, ranks) if count]
    columns = zip(torch.split(x, counts), torch.split(y, counts), strict=True)
    expect(call, parts, [{"words": shared, "x": one, "scale": scale, "y": other} for one, other in columns])
    for rank, part in enumerate(parts):
        if part["words"] is not shared:
            raise WrongAnswer(f"{call}: rank {rank} should get the list itself, not a copy")
        part["scale"].zero_()
    if scale != 5:
        raise WrongAnswer(f"{call}: every rank needs a clone of the 0-d tensor; a write into one changed the batch's")
