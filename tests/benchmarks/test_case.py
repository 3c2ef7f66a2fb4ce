"""Bounds: which rows they are about, and when they hold."""

import pytest

from mgpu_core.tools.bench.case import Bound, Row, at_least, at_most, measure_row
from mgpu_core.tools.bench.timing import Contestant, Schedule, WrongResult

pytestmark = pytest.mark.slow

ROWS = [
    Row({"ranks": 2, "size": 64}, {"ours": [1.0], "gloo": [6.0], "torch": [0.5]}),
    Row({"ranks": 8, "size": 64}, {"ours": [2.0], "gloo": [10.0]}),
]


@pytest.mark.parametrize(
    ("bound", "value", "held"),
    [
        (at_least(6, "gloo", ranks=2), 6.0, True),
        (at_least(6.1, "gloo", ranks=2), 6.0, False),
        (at_most(2, "torch", ranks=2, size=64), 2.0, True),
        (at_most(1.9, "torch", ranks=2, size=64), 2.0, False),
        (at_least(5, "gloo", ranks=8), 5.0, True),
        (at_least(1, "gloo", ranks=4), None, None),
        (at_least(1, "torch", ranks=8), None, None),
    ],
)
def test_a_bound_judges_its_own_row(bound: Bound, value: float | None, held: bool | None) -> None:
    verdict = bound.judge(ROWS)
    assert (verdict.value, verdict.held) == (value, held)


def test_a_bound_says_which_way_it_goes() -> None:
    assert at_least(1.3, "torch", ranks=2).judge(ROWS).text == "ranks 2: torch / ours >= 1.3"
    assert at_most(0.2, "torch", ranks=2).judge(ROWS).text == "ranks 2: ours / torch <= 0.2"


def test_a_wrong_value_names_its_row() -> None:
    with pytest.raises(WrongResult, match="ranks 2, size 64: ours: 5 wrong values"):
        measure_row({"ranks": 2, "size": 64}, {"ours": Contestant(lambda: 1.0, lambda: 5)}, Schedule(repeats=1))
