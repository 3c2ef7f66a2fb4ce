"""Compare a run with an older one of the same case, row by row."""

from mgpu_core.tools.bench.case import Label, Row, UsageError, describe
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.bench.timing import OURS, median

__all__ = ["slower_rows"]


def slower_rows(result: Result, baseline: Result, percent: float) -> tuple[list[str], int, int]:
    """Return the rows whose median time of ours is more than ``percent`` above the baseline's, as text.

    Rows that either run has measured on a busy machine are not judged: the second value is their number, the third
    that of all rows of both runs.

    Raises:
        UsageError: the baseline is of another case, or no row of it has the labels of a row of the run.
    """
    if baseline.case != result.case:
        raise UsageError(f"the baseline is of the case {baseline.case}, not of {result.case}")
    before, now = _by_labels(baseline), _by_labels(result)
    both = [labels for labels in now if labels in before]
    if not both:
        raise UsageError(f"no row of the baseline is one of this run's: {'; '.join(map(_name, now))}")
    quiet = [labels for labels in both if not (now[labels].busy or before[labels].busy)]
    above = {each: 100 * (_seconds(now[each]) / _seconds(before[each]) - 1) for each in quiet}
    slower = [f"{_name(labels)} by {more:.0f} %" for labels, more in above.items() if more > percent]
    return slower, len(both) - len(quiet), len(both)


def _by_labels(result: Result) -> dict[tuple[tuple[str, Label], ...], Row]:
    return {tuple(each.labels.items()): each for row in result.rows for each in row.of_each_algorithm()}


def _name(labels: tuple[tuple[str, Label], ...]) -> str:
    return describe(dict(labels))


def _seconds(row: Row) -> float:
    return median(row.seconds[OURS])
