"""Each process's ballot, sent with the last message of an update: its weight, and whether it is ready.

The ballot follows the gradients, in the same message: a field for each process, zero in all others, so that a
sum over the processes brings them all through as they are.  A number is sent as its bytes, one to an element, which
every floating dtype holds exactly.  After the fields comes the number of processes that used each parameter.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

__all__ = ["Ballot", "Standing", "Tally", "read", "tail_count", "write"]

_FIELD = struct.Struct("<dIIB")
_UPDATES = 2**32


class Standing(IntEnum):
    """The next action of a process."""

    TRAINS = 0
    JOINED = 1
    """It has no more data, and follows the others."""
    FAILED = 2
    """It has given the step up, and so must all."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """One process's words.

    Attributes:
        standing: see :class:`Standing`.
        update: how many updates it has made.
        settings: a 32-bit checksum of the settings that all must share.
        weight: of its gradients: rows, or the weight of a weighted loss.
        used: per parameter whether a rank of the process used it.
    """

    standing: Standing
    update: int
    settings: int
    weight: float
    used: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Tally:
    """All processes' words.

    Attributes:
        standings, updates, settings: per process.
        weight: of all together.
        used: per parameter whether any rank of any process used it.
    """

    standings: tuple[Standing, ...]
    updates: tuple[int, ...]
    settings: tuple[int, ...]
    weight: float
    used: list[bool]


def tail_count(processes: int, parameters: int) -> int:
    """Return how many elements the words of so many processes about so many parameters take."""
    return processes * _FIELD.size + parameters


def write(tail: torch.Tensor, ballot: Ballot, process: int, processes: int) -> None:
    """Fill the end of a message with one process's words, of any floating or complex dtype."""
    fields = bytearray(processes * _FIELD.size)
    words = ballot.weight, ballot.update % _UPDATES, ballot.settings, ballot.standing
    _FIELD.pack_into(fields, process * _FIELD.size, *words)
    with torch.no_grad():
        tail.copy_(torch.tensor([*fields, *map(int, ballot.used)], dtype=torch.float64, device="cpu"))


def read(tail: torch.Tensor, processes: int) -> Tally:
    """Read the ballots at the end of a message that was summed over all processes; wait for its device."""
    numbers = [int(each) for each in (tail.real if tail.is_complex() else tail).tolist()]
    end = processes * _FIELD.size
    fields = list(_FIELD.iter_unpack(bytes(numbers[:end])))
    return Tally(
        tuple(Standing(standing) for *_, standing in fields),
        tuple(update for _, update, *_ in fields),
        tuple(settings for *_, settings, _ in fields),
        sum(weight for weight, *_ in fields),
        [count > 0 for count in numbers[end:]],
    )
