"""Rows and how they are measured; bounds: which rows they are about, and when they hold."""

import dataclasses

import pytest
from fakes.other_programs import Others

from mgpu_core.support.progress import silent
from mgpu_core.tools.bench.case import Bound, Contest, Row, RowPlan, Ruling, at_least, at_most
from mgpu_core.tools.bench.measure import measured
from mgpu_core.tools.bench.timing import Contestant, Timing, WrongResult

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
    labels = {"ranks": 2, "size": 64}
    contest = Contest(labels, {"ours": Contestant(lambda: 1.0, lambda: 5)}, Timing(repeats=1))
    with pytest.raises(WrongResult, match="ranks 2, size 64 B: ours: 5 wrong values"):
        next(measured(RowPlan([labels], (each for each in [contest])), silent))


def plan(count: int) -> RowPlan:
    """Rows of two contestants that always take one and two seconds."""
    sides = {who: Contestant(lambda each=each: each, lambda: 0) for who, each in (("ours", 1.0), ("gloo", 2.0))}
    labels = [{"device": "cpu", "ranks": ranks} for ranks in range(1, count + 1)]
    return RowPlan(labels, (Contest(each, sides, Timing(repeats=2)) for each in labels))


def test_the_report_names_the_labels_that_vary() -> None:
    told: list[tuple[float, str]] = []
    rows = list(measured(plan(2), lambda share, text: told.append((share, text))))
    assert [row.seconds for row in rows] == [{"ours": [1.0, 1.0], "gloo": [2.0, 2.0]}] * 2
    assert [(round(6 * share), text) for share, text in told] == [
        (0, "row 1 of 2 (ranks 1), round 1 of 3"),
        (1, "row 1 of 2 (ranks 1), round 2 of 3"),
        (2, "row 1 of 2 (ranks 1), round 3 of 3"),
        (3, "row 2 of 2 (ranks 2), round 1 of 3"),
        (4, "row 2 of 2 (ranks 2), round 2 of 3"),
        (5, "row 2 of 2 (ranks 2), round 3 of 3"),
    ]


def test_rows_next_to_other_work_are_marked(others: Others) -> None:
    others.looks = [0.0, 0.0, 1.0, 0.0, 0.0]
    assert [row.busy for row in measured(plan(4), silent)] == [False, True, True, False]


def test_a_busy_row_is_not_judged() -> None:
    busy = [dataclasses.replace(ROWS[0], busy=True)]
    assert at_least(6, "gloo", ranks=2).judge(busy) == Ruling("ranks 2: gloo / ours >= 6", 6.0, None, busy=True)


def test_a_bound_on_another_algorithm_of_ours() -> None:
    row = Row({"ranks": 2, "algorithm": "naive"}, {"ours": [1.0], "ours ring": [2.0], "gloo": [6.0]})
    assert at_least(3, "gloo", algorithm="ring").judge([row]).value == 3.0
    assert at_least(6, "gloo", algorithm="naive").judge([row]).value == 6.0
    assert [(each.labels["algorithm"], each.seconds) for each in row.of_each_algorithm()] == [
        ("naive", {"ours": [1.0], "gloo": [6.0]}),
        ("ring", {"ours": [2.0], "gloo": [6.0]}),
    ]
