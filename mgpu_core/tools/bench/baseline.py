"""Compare a run with an older one of the same case, row by row."""

from mgpu_core.tools.bench.case import Label, Row, UsageError, describe
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.bench.timing import OURS, median

__all__ = ["compared"]


def compared(result: Result, baseline: Result) -> dict[str, float | None]:
    """Return by how many percent each row that both have is slower than the baseline's, by the median of ours.

    It is None where either was measured on a busy machine.

    Raises:
        UsageError: the baseline is of another case, or no row of it has the labels of a row of the run.
    """
    if baseline.case != result.case:
        raise UsageError(f"the baseline is of the case {baseline.case}, not of {result.case}")
    before, now = _by_labels(baseline), _by_labels(result)
    both = {describe(dict(labels)): (now[labels], before[labels]) for labels in now if labels in before}
    if not both:
        names = "; ".join(describe(dict(labels)) for labels in now)
        raise UsageError(f"no row of the baseline is one of this run's: {names}")
    return {name: None if new.busy or old.busy else _slower(new, old) for name, (new, old) in both.items()}


def _by_labels(result: Result) -> dict[tuple[tuple[str, Label], ...], Row]:
    return {tuple(each.labels.items()): each for row in result.rows for each in row.of_each_algorithm()}


def _slower(new: Row, old: Row) -> float:
    return 100 * (median(new.seconds[OURS]) / median(old.seconds[OURS]) - 1)
