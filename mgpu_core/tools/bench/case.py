"""A case, and its result: rows of times, and the bounds that they keep or miss.

A bound is a fact of the project: with these labels, that ratio. It is written down beside the case and checked by
`--check`; a run that measured other rows says so.
"""

import argparse
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mgpu_core.tools.bench.timing import OURS, Contestant, Schedule, WrongResult, contest, ratio
from mgpu_core.tools.explain.tables import human_nbytes

Label = int | str
Labels = Mapping[str, Label]


class UsageError(ValueError):
    """The request cannot be served: exit status 2, before anything is measured."""


@dataclass(frozen=True)
class Row:
    """One line of a comparison.

    Attributes:
        labels: the row's settings, in the order of the columns.
        seconds: per contestant its times, ours first.
        nbytes: counted by a rate; None where a rate means nothing.
        bus_factor: busbw over algbw, as nccl-tests define it; None for cases that are no collectives.
    """

    labels: dict[str, Label]
    seconds: dict[str, list[float]]
    nbytes: int | None = None
    bus_factor: float | None = None

    def ratios(self) -> dict[str, float]:
        """Per peer its median over ours."""
        return {name: ratio(self.seconds, name) for name in self.seconds if name != OURS}


@dataclass(frozen=True)
class Verdict:
    """One bound against one run; `held` is None where its row was not measured."""

    text: str
    value: float | None
    held: bool | None


@dataclass(frozen=True)
class Bound:
    """A ratio that the rows with the labels `where` must keep.

    `at least`: peer / ours; `at most`: ours / peer. Both are ratios of medians.
    """

    kind: Literal["at least", "at most"]
    limit: float
    peer: str
    where: Labels

    def judge(self, rows: Sequence[Row]) -> Verdict:
        """Return the verdict on the first row that the bound is about."""
        found = [row.ratios() for row in rows if self.where.items() <= row.labels.items()]
        value = next((ratios[self.peer] for ratios in found if self.peer in ratios), None)
        if value is None:
            return Verdict(self._text(), None, None)
        if self.kind == "at most":
            value = 1 / value
        return Verdict(self._text(), value, value >= self.limit if self.kind == "at least" else value <= self.limit)

    def _text(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self.where.items())
        sides, sign = (f"{self.peer} / ours", ">=") if self.kind == "at least" else (f"ours / {self.peer}", "<=")
        return f"{where}: {sides} {sign} {self.limit:g}"


def at_least(limit: float, peer: str, **where: Label) -> Bound:
    """We are at least `limit` times as fast as the peer."""
    return Bound("at least", limit, peer, where)


def at_most(limit: float, peer: str, **where: Label) -> Bound:
    """We take at most `limit` of the peer's time."""
    return Bound("at most", limit, peer, where)


@dataclass(frozen=True)
class Case:
    """A comparison that `run.py` can run.

    Attributes:
        name: as on the command line.
        summary: one line.
        peers: the contestants beside ours that a run has without `--peers`.
        measure: the rows, one after the other. `UsageError` at once for options that it cannot serve.
        add_arguments: adds the case's own options.
        unit: of the times in its table: `us`, `ms` or `s`.
        formula: how its rates are computed, with units; empty if it has none.
        more_peers: those that `--peers` has to name.
        bounds: checked by `--check`.
        repeats: rounds without `--repeats`.
    """

    name: str
    summary: str
    peers: tuple[str, ...]
    measure: Callable[[argparse.Namespace], Generator[Row]]
    add_arguments: Callable[[argparse.ArgumentParser], object]
    unit: str
    formula: str = ""
    more_peers: tuple[str, ...] = ()
    bounds: tuple[Bound, ...] = field(default=())
    repeats: int = 10


def chosen(contestants: Mapping[str, Contestant], peers: Sequence[str]) -> dict[str, Contestant]:
    """Ours and those of the peers, ours first."""
    return {name: contestants[name] for name in (OURS, *peers)}


def measure_row(
    labels: dict[str, Label],
    contestants: Mapping[str, Contestant],
    schedule: Schedule,
    nbytes: int | None = None,
    bus_factor: float | None = None,
) -> Row:
    """Verify, run and verify again.

    Raises:
        WrongResult: which contestant is wrong in which row.
    """
    try:
        seconds = contest(contestants, schedule)
    except WrongResult as error:
        raise WrongResult(f"{describe(labels)}: {error}") from error
    return Row(labels, seconds, nbytes, bus_factor)


def describe(labels: Labels) -> str:
    """`ranks 2, size 1024`."""
    return ", ".join(f"{name} {value}" for name, value in labels.items())


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the labels in which the rows differ."""
    return [name for name in rows[0].labels if len({row.labels[name] for row in rows}) > 1]


def show_label(name: str, value: Label) -> str:
    """Return a label's value for people: a size with its unit."""
    return human_nbytes(int(value)) if name == "size" else str(value)
