"""A case, and its result: rows of times, and the bounds that they keep or miss.

A bound is a fact of the project: with these labels, that ratio. It is written down beside the case and checked by
`--check`; a run that measured other rows says so.
"""

import argparse
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mgpu_core.support.tables import human_nbytes
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, ratio

Label = int | str
Labels = Mapping[str, Label]


class UsageError(ValueError):
    """The request cannot be served: exit status 2, before anything is measured."""


@dataclass(frozen=True)
class Row:
    """One line of a comparison.

    Attributes:
        labels: the row's settings, in the order of the columns.
        seconds: per contestant its times, ours first. Other algorithms of ours are contestants `ours ALGORITHM`.
        nbytes: counted by a rate; None where a rate means nothing.
        bus_factor: busbw over algbw, as nccl-tests define it; None for cases that are no collectives.
        without: peers that cannot do what the row asks, and why.
        busy: other programs kept processors busy before the row or after it.
    """

    labels: dict[str, Label]
    seconds: dict[str, list[float]]
    nbytes: int | None = None
    bus_factor: float | None = None
    without: dict[str, str] = field(default_factory=dict)
    busy: bool = False

    def ratios(self) -> dict[str, float]:
        """Per peer its median over ours."""
        return {name: ratio(self.seconds, name) for name in self.seconds if name != OURS}

    def title_of(self, who: str) -> str:
        """Return a contestant's name for people: that of ours has its algorithm, where others of ours take part."""
        among_ours = any(name.startswith(f"{OURS} ") for name in self.seconds)
        return f"{OURS} {self.labels['algorithm']}" if who == OURS and among_ours else who

    def of_each_algorithm(self) -> "list[Row]":
        """Return a row for each algorithm of ours, with the same times of the peers."""
        peers = {name: seconds for name, seconds in self.seconds.items() if not name.startswith(OURS)}
        rows = []
        for name in [each for each in self.seconds if each not in peers]:
            labels = self.labels if name == OURS else {**self.labels, "algorithm": name.removeprefix(f"{OURS} ")}
            rows.append(replace(self, labels=labels, seconds={OURS: self.seconds[name], **peers}))
        return rows


@dataclass(frozen=True)
class Contest:
    """A row to be measured; attributes as of `Row`."""

    labels: dict[str, Label]
    contestants: Mapping[str, Contestant]
    schedule: Timing
    nbytes: int | None = None
    bus_factor: float | None = None
    without: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RowPlan:
    """The rows of a run.

    Attributes:
        labels: of all rows, known before the first is measured.
        contests: the rows, each made when the one before is measured.
    """

    labels: Sequence[Labels]
    contests: Generator[Contest]


@dataclass(frozen=True)
class Ruling:
    """One bound against one run; `held` is None where its row was not measured, or on a busy machine."""

    text: str
    value: float | None
    held: bool | None
    busy: bool = False


@dataclass(frozen=True)
class Bound:
    """A ratio that the rows with the labels `where` must keep.

    `at least`: peer / ours; `at most`: ours / peer. Both are ratios of medians.
    """

    kind: Literal["at least", "at most"]
    limit: float
    peer: str
    where: Labels

    def judge(self, rows: Sequence[Row]) -> Ruling:
        """Return the verdict on the first row that the bound is about."""
        alone = [each for row in rows for each in row.of_each_algorithm()]
        about = [row for row in alone if self.where.items() <= row.labels.items() and self.peer in row.seconds]
        if not about:
            return Ruling(self._text(), None, None)
        value = about[0].ratios()[self.peer]
        if self.kind == "at most":
            value = 1 / value
        if about[0].busy:
            return Ruling(self._text(), value, None, busy=True)
        return Ruling(self._text(), value, value >= self.limit if self.kind == "at least" else value <= self.limit)

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
        plan: the rows. `UsageError` for options that it cannot serve.
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
    plan: Callable[[argparse.Namespace], RowPlan]
    add_arguments: Callable[[argparse.ArgumentParser], object]
    unit: str
    formula: str = ""
    more_peers: tuple[str, ...] = ()
    bounds: tuple[Bound, ...] = field(default=())
    repeats: int = 10


def refuse(options: argparse.Namespace, peer: str, reason: str) -> None:
    """Raise `UsageError` if there is a reason why a peer cannot take part, and `--peers` names it."""
    if reason and peer in options.named:
        raise UsageError(f"--peers {peer}: {reason}")


def chosen(contestants: Mapping[str, Contestant], peers: Sequence[str]) -> dict[str, Contestant]:
    """Ours and those of the peers, ours first."""
    return {name: contestants[name] for name in (OURS, *peers)}


def describe(labels: Labels) -> str:
    """`ranks 2, size 1 KiB`."""
    return ", ".join(f"{name} {show_label(name, value)}" for name, value in labels.items())


def varying(labels: Sequence[Labels]) -> list[str]:
    """Return the names of the labels in which the rows differ."""
    names = dict.fromkeys(name for each in labels for name in each)
    return [name for name in names if len({each.get(name) for each in labels}) > 1]


def show_label(name: str, value: Label) -> str:
    """Return a label's value for people: a size with its unit."""
    return human_nbytes(int(value)) if name == "size" else str(value)
