"""Measure the rows of a plan, one after the other."""

import contextlib
from collections.abc import Generator
from dataclasses import replace

from mgpu_core.support.busy import busy_note
from mgpu_core.support.progress import Report, within
from mgpu_core.tools.bench.case import Contest, Row, RowPlan, describe, varying
from mgpu_core.tools.bench.timing import OnRound, WrongResult, contest, nothing

__all__ = ["measured", "row_of"]


def measured(plan: RowPlan, report: Report) -> Generator[Row]:
    """Yield the rows; report the rounds. A row is marked if the machine was busy before it or after it.

    Raises:
        WrongResult: which contestant is wrong in which row.
    """
    busy = bool(busy_note())
    with contextlib.closing(plan.contests):
        for index in range(len(plan.labels)):
            # No name here holds the contest: its tensors are gone before those of the next one are made.
            row = row_of(next(plan.contests), _reporting(plan, index, report))
            before, busy = busy, bool(busy_note())
            yield replace(row, busy=before or busy)


def row_of(row: Contest, on_round: OnRound = nothing) -> Row:
    """Verify, run and verify again.

    Raises:
        WrongResult: which contestant is wrong in which row.
    """
    try:
        seconds = contest(row.contestants, row.schedule, on_round)
    except WrongResult as error:
        raise WrongResult(f"{describe(row.labels)}: {error}") from error
    return Row(row.labels, seconds, row.nbytes, row.bus_factor, row.without)


def _reporting(plan: RowPlan, index: int, report: Report) -> OnRound:
    """Return the report of a row's rounds, which names the labels in which the rows differ."""
    count, labels = len(plan.labels), plan.labels[index]
    name = describe({each: labels[each] for each in varying(plan.labels)})
    row = f"row {index + 1} of {count}{f' ({name})' if name else ''}"

    of_row = within(report, index, count)
    return lambda number, rounds: of_row(number / rounds, f"{row}, round {number + 1} of {rounds}")
