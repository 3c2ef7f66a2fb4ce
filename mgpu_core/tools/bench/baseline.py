"""Compare a run with an older one of the same case, row by row."""

from mgpu_core.tools.bench.case import UsageError, describe
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.bench.timing import OURS, median

__all__ = ["slower_rows"]


def slower_rows(result: Result, baseline: Result, percent: float) -> list[str]:
    """Return the rows whose median time of ours is more than ``percent`` above the baseline's, as text.

    Raises:
        UsageError: the baseline is of another case, or no row of it has the labels of a row of the run.
    """
    if baseline.case != result.case:
        raise UsageError(f"the baseline is of the case {baseline.case}, not of {result.case}")
    before = {describe(row.labels): median(row.seconds[OURS]) for row in baseline.rows}
    now = {describe(row.labels): median(row.seconds[OURS]) for row in result.rows}
    both = [name for name in now if name in before]
    if not both:
        raise UsageError(f"no row of the baseline is one of this run's: {'; '.join(now)}")
    above = {name: 100 * (now[name] / before[name] - 1) for name in both}
    return [f"{name} by {more:.0f} %" for name, more in above.items() if more > percent]
