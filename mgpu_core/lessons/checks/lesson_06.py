"""Lesson 6, buckets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgpu_core.lessons.answers import WrongAnswer, asks_for, expect

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_RANKS = (1, 2, 3, 8)
_SHAPES = ((2, 3), (4,), (1, 1), (5, 2))
_BUCKETS: tuple[list[list[int]], ...] = ([[3, 2], [1, 0]], [[0, 1, 2, 3]], [[3], [2, 1, 0]], [[2], [0], [3], [1]])


@asks_for("reduce_in_buckets")
def exercise_1(answer: Callable[..., Any]) -> None:
    """Right sums in the same tensors, and one message per bucket of the right length."""
    for ranks in _RANKS:
        for buckets in _BUCKETS:
            _check_buckets(answer, ranks, buckets)


def _check_buckets(answer: Callable[..., Any], ranks: int, buckets: list[list[int]]) -> None:
    call = f"reduce_in_buckets(gradients of {ranks} ranks, {buckets}, all_reduce)"
    gradients = [[torch.full(shape, 10.0 * i + rank) for i, shape in enumerate(_SHAPES)] for rank in range(ranks)]
    lengths: list[int] = []

    def all_reduce(flats: Sequence[torch.Tensor]) -> None:
        if len(flats) != ranks or any(flat.dim() != 1 or len(flat) != len(flats[0]) for flat in flats):
            shapes = [tuple(flat.shape) for flat in flats]
            raise WrongAnswer(f"{call}: all_reduce wants one flat tensor per rank, of equal length, and got {shapes}")
        lengths.append(len(flats[0]))
        total = torch.stack(list(flats)).sum(dim=0)
        for flat in flats:
            flat.copy_(total)

    answer([list(own) for own in gradients], [list(bucket) for bucket in buckets], all_reduce)
    wanted = [sum(torch.Size(_SHAPES[i]).numel() for i in bucket) for bucket in buckets]
    expect(f"{call}, elements of each call of all_reduce", lengths, wanted)
    for rank, own in enumerate(gradients):
        sums = [torch.full(shape, 10.0 * i * ranks + sum(range(ranks))) for i, shape in enumerate(_SHAPES)]
        expect(f"{call}, the gradients of rank {rank}", own, sums)


@asks_for("complete_buckets")
def exercise_2(answer: Callable[..., Any]) -> None:
    """Random orders; also a gradient that never comes."""
    chance = random.Random(6)
    for ranks in _RANKS:
        for bucket_of in ({0: 0}, {0: 1, 1: 0}, {0: 2, 1: 1, 2: 1, 3: 0, 4: 0}):
            events = [(rank, parameter) for rank in range(ranks) for parameter in bucket_of]
            for left_out in (0, 0, 0, 1, 2):
                chance.shuffle(events)
                some = events[left_out:]
                call = f"complete_buckets({some}, {bucket_of}, {ranks})"
                expect(call, answer(list(some), dict(bucket_of), ranks), _complete(some, bucket_of, ranks))


def _complete(events: Sequence[tuple[int, int]], bucket_of: dict[int, int], ranks: int) -> list[int]:
    seen: Counter[int] = Counter()
    found = []
    wanted = Counter(bucket_of.values())
    for _, parameter in events:
        seen[bucket_of[parameter]] += 1
        if seen[bucket_of[parameter]] == ranks * wanted[bucket_of[parameter]]:
            found.append(bucket_of[parameter])
    return found


@asks_for("finish")
def exercise_3(answer: Callable[[list[int], list[int], int, int], Any]) -> None:
    """A free wire, a busy one, and both in turn."""
    for ready, nbytes, wanted in (
        ([], [], 0),
        ([100], [1000], 120),
        ([100, 200], [1000, 1000], 220),
        ([100, 105], [1000, 1000], 140),
        ([100, 105, 300], [1000, 5000, 0], 310),
        ([0, 0, 0, 500, 500], [2000, 1000, 3000, 1000, 1000], 540),
        ([50, 300, 301], [20_000, 1000, 1000], 340),
    ):
        call = f"finish(ready={ready}, nbytes={nbytes}, latency=10, rate=100)"
        expect(call, answer(list(ready), list(nbytes), 10, 100), wanted)
