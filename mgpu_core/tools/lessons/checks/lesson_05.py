"""Lesson 5, reduce: results in whole numbers, and every message counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_RANKS = (1, 2, 3, 4, 5, 8)
_COUNTS = (24, 10, 5, 1)
_EXTRA = 1  # what a wire adds that shows who uses what comes over it


class _Wire:
    """Carries copies between ranks, changed by `extra`, and counts messages and elements."""

    def __init__(self, call: str, ranks: int, extra: int = 0) -> None:
        self._call, self._ranks, self._extra = call, ranks, extra
        self.messages: list[tuple[int, int, int]] = []

    def send(self, source: int, target: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, with the extra added to all numbers."""
        if source not in range(self._ranks) or target not in range(self._ranks) or source == target:
            raise WrongAnswer(f"{self._call}: there is no wire from rank {source} to rank {target}")
        self.messages.append((source, target, tensor.numel()))
        return tensor + self._extra

    @property
    def elements(self) -> int:
        """Carried by all messages together."""
        return sum(count for _, _, count in self.messages)


def _run(name: str, answer: Callable[..., Any], ranks: int, count: int) -> tuple[str, _Wire]:
    """Check the sums, and return the call of the function of this name, and its wire."""
    tensors = _tensors(ranks, count)
    wanted = torch.stack(tensors).sum(dim=0)
    call = f"{name}({ranks} tensors of {count} numbers, send)"
    wire = _Wire(call, ranks)
    answer(list(tensors), wire.send)
    for rank, tensor in enumerate(tensors):
        expect(f"{call}, the tensor of rank {rank}", tensor, wanted)
    return call, wire


def _tensors(ranks: int, count: int) -> list[torch.Tensor]:
    return [torch.arange(count, dtype=torch.int64) + 100**rank for rank in range(ranks)]


def _check_use(call: str, answer: Callable[..., Any], count: int, hops: Sequence[int]) -> None:
    """Check: the result of `send` is added and kept: with a `send` that adds to it, every message of a number shows.

    `hops` says of each rank how many messages a sum has gone through when it comes there, from where it is complete.
    """
    tensors = _tensors(len(hops), count)
    added = (len(hops) - 1 + torch.tensor(sorted(hops))) * _EXTRA
    wanted = torch.stack(tensors).sum(dim=0) + added[:, None]
    answer(list(tensors), _Wire(call, len(hops), _EXTRA).send)
    got = torch.stack(tensors).sort(dim=0).values  # a chunk of a ring may be complete on any rank
    where = f"{call}, with a send that adds {_EXTRA} to all that it carries"
    for index in range(count):
        expect(f"{where}: number {index} of all ranks, sorted (use what send returns)", got[:, index], wanted[:, index])


def _check_total(call: str, wire: _Wire, ranks: int, count: int) -> None:
    wanted = 2 * (ranks - 1) * count
    if wire.elements != wanted:
        raise WrongAnswer(f"{call}: all ranks together should send {wanted} numbers, and send {wire.elements}")


@asks_for("ring_all_reduce")
def exercise_1(answer: Callable[..., Any]) -> None:
    """Check: right sums; messages of one chunk, between neighbours, and no more of them than needed."""
    for ranks in _RANKS:
        for count in _COUNTS:
            call, wire = _run("ring_all_reduce", answer, ranks, count)
            for source, target, sent in wire.messages:
                if target != (source + 1) % ranks:
                    raise WrongAnswer(f"{call}: rank {source} sends to rank {target}, which is not the next one")
                if sent > -(-count // ranks):
                    raise WrongAnswer(
                        f"{call}: a message has {sent} numbers, and the largest chunk has {-(-count // ranks)}"
                    )
            _check_total(call, wire, ranks, count)
            _check_chunks(call, wire, ranks, count)
            _check_use(call, answer, count, range(ranks))


def _check_chunks(call: str, wire: _Wire, ranks: int, count: int) -> None:
    """Check: each rank sends every chunk but one, twice over the two trips: the sizes are those of an even cut."""
    sizes = ([size for _, size in _core.chunk_plan(count, ranks)] + [0] * ranks)[:ranks]
    for rank in range(ranks):
        sent = sorted(carried for source, _, carried in wire.messages if source == rank and carried)
        if sent not in _without_one_each(sizes):
            raise WrongAnswer(
                f"{call}: rank {rank} sends messages of {sent} numbers; on each of the two trips it should send every "
                f"chunk but one, and the chunks are {sizes}"
            )


def _without_one_each(sizes: Sequence[int]) -> list[list[int]]:
    """Return all ways to leave out one chunk on the first trip and one on the second."""
    ways = []
    for first in range(len(sizes)):
        for second in range(len(sizes)):
            twice = [*sizes[:first], *sizes[first + 1 :], *sizes[:second], *sizes[second + 1 :]]
            ways.append(sorted(size for size in twice if size))
    return ways


@asks_for("tree_all_reduce")
def exercise_2(answer: Callable[..., Any]) -> None:
    """Check: right sums; whole tensors, and no rank with more messages than a tree gives it."""
    for ranks in _RANKS:
        call, wire = _run("tree_all_reduce", answer, ranks, 6)
        _check_total(call, wire, ranks, 6)
        rounds = (ranks - 1).bit_length()
        for rank in range(ranks):
            received = sum(target == rank for _, target, _ in wire.messages)
            if received > rounds:
                too_many = (
                    f"rank {rank} receives {received} messages, and in a tree no rank receives more than {rounds}"
                )
                raise WrongAnswer(f"{call}: {too_many}")
        _check_pairs(call, wire, ranks)
        _check_use(call, answer, 6, [rank.bit_count() for rank in range(ranks)])


def _check_pairs(call: str, wire: _Wire, ranks: int) -> None:
    """Check: who sends to whom: the pairs of a binomial tree, up and down."""
    wanted = sorted((source, target) for hops in _core.tree_schedule(ranks) for source, target, _, _ in hops)
    sent = sorted((source, target) for source, target, _ in wire.messages)
    if sent != wanted:
        source, target = next(pair for pair in [*sent, *wanted] if sent.count(pair) != wanted.count(pair))
        raise WrongAnswer(
            f"{call}: rank {source} sends to rank {target} {sent.count((source, target))} times, and in this tree, "
            f"whose sums go to the lower rank, {wanted.count((source, target))} times"
        )


@asks_for("nbytes_sent")
def exercise_3(answer: Callable[[str, int, int], Any]) -> None:
    """Check the core's schedules."""
    for ranks in _RANKS:
        nbytes = 120 * 4
        for algorithm in ("ring", "naive", "tree"):
            wanted = _sent(algorithm, ranks, nbytes)
            expect(f"nbytes_sent({algorithm!r}, {ranks}, {nbytes})", answer(algorithm, ranks, nbytes), wanted)


def _sent(algorithm: str, ranks: int, nbytes: int) -> list[int]:
    sent = [0] * ranks
    for source, carried in _messages(algorithm, ranks, nbytes):
        sent[source] += carried
    return sent


def _messages(algorithm: str, ranks: int, nbytes: int) -> Sequence[tuple[int, int]]:
    if algorithm == "naive":
        return [(rank, nbytes) for rank in range(1, ranks)] + [(0, nbytes)] * (ranks - 1)
    is_ring = algorithm == "ring"
    rounds = _core.ring_schedule(ranks) if is_ring else _core.tree_schedule(ranks)
    return [(source, nbytes // ranks if is_ring else nbytes) for hops in rounds for source, _, _, _ in hops]
