"""Lesson 6, buckets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_RANKS = (1, 2, 3, 8)
_SHAPES = ((2, 3), (4,), (1, 1), (5, 2))
_BUCKETS: tuple[list[list[int]], ...] = ([[3, 2], [1, 0]], [[0, 1, 2, 3]], [[3], [2, 1, 0]], [[2], [0], [3], [1]])


class _RingAllReduce:
    """Put the sum of the flat tensors and the extra into all of them; keep the inputs."""

    def __init__(self, call: str, ranks: int, extra: float) -> None:
        self._call, self._ranks, self._extra = call, ranks, extra
        self.given: list[list[list[float]]] = []

    def __call__(self, flats: Sequence[torch.Tensor]) -> None:
        shapes = [tuple(flat.shape) for flat in flats]
        if len(flats) != self._ranks or len(shapes[0]) != 1 or len(set(shapes)) > 1:
            raise WrongAnswer(
                f"{self._call}: all_reduce wants one flat tensor per rank, of equal length, and got {shapes}"
            )
        self.given.append([flat.tolist() for flat in flats])
        total = torch.stack(list(flats)).sum(dim=0) + self._extra
        for flat in flats:
            flat.copy_(total)


@asks_for("reduce_in_buckets")
def exercise_1(answer: Callable[..., Any]) -> None:
    """Right sums in the same tensors, and one message per bucket, with its gradients; the sums are those of that."""
    for ranks in _RANKS:
        for buckets in _BUCKETS:
            call = f"reduce_in_buckets(gradients of {ranks} ranks, {buckets}, all_reduce)"
            _check_buckets(call, answer, ranks, buckets, 0.0)
            _check_buckets(f"{call}, whose all_reduce adds 0.5 to every sum", answer, ranks, buckets, 0.5)


def _check_buckets(call: str, answer: Callable[..., Any], ranks: int, buckets: list[list[int]], extra: float) -> None:
    gradients = [[torch.full(shape, 10.0 * i + rank) for i, shape in enumerate(_SHAPES)] for rank in range(ranks)]
    all_reduce = _RingAllReduce(call, ranks, extra)
    answer([list(own) for own in gradients], [list(bucket) for bucket in buckets], all_reduce)
    sizes = [torch.Size(shape).numel() for shape in _SHAPES]
    wanted = [sum(sizes[i] for i in bucket) for bucket in buckets]
    lengths = [len(flats[0]) for flats in all_reduce.given]
    expect(f"{call}, elements of each call of all_reduce", lengths, wanted)
    for bucket, flats in zip(buckets, all_reduce.given, strict=True):
        for rank, flat in enumerate(flats):
            held = sorted(10.0 * i + rank for i in bucket for _ in range(sizes[i]))
            expect(f"{call}, what all_reduce gets from rank {rank} for the bucket {bucket}, sorted", sorted(flat), held)
    for rank, of_rank in enumerate(gradients):
        sums = [torch.full(shape, 10.0 * i * ranks + sum(range(ranks)) + extra) for i, shape in enumerate(_SHAPES)]
        expect(f"{call}, the gradients of rank {rank}", of_rank, sums)


@asks_for("complete_buckets")
def exercise_2(answer: Callable[..., Any]) -> None:
    """Check: random orders; also a gradient that never comes."""
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
    completed = []
    wanted = Counter(bucket_of.values())
    for _, parameter in events:
        seen[bucket_of[parameter]] += 1
        if seen[bucket_of[parameter]] == ranks * wanted[bucket_of[parameter]]:
            completed.append(bucket_of[parameter])
    return completed


@asks_for("finish")
def exercise_3(answer: Callable[[list[int], list[int], int, int], Any]) -> None:
    """Check: A free wire, a busy one, and both in turn; on wires of another latency, and of another rate."""
    for ready, nbytes, latency, rate, wanted in (
        ([], [], 10, 100, 0),
        ([100], [1000], 10, 100, 120),
        ([100, 200], [1000, 1000], 10, 100, 220),
        ([100, 105], [1000, 1000], 10, 100, 140),
        ([100, 105, 300], [1000, 5000, 0], 10, 100, 310),
        ([0, 0, 0, 500, 500], [2000, 1000, 3000, 1000, 1000], 10, 100, 540),
        ([50, 300, 301], [20_000, 1000, 1000], 10, 100, 340),
        ([100, 105], [1000, 1000], 25, 100, 170),
        ([100, 105], [1000, 1000], 10, 50, 160),
        ([100, 105], [1000, 1000], 0, 500, 107),
    ):
        call = f"finish(ready={ready}, nbytes={nbytes}, latency={latency}, rate={rate})"
        expect(call, answer(list(ready), list(nbytes), latency, rate), wanted)
