"""The case `all_reduce_model`: its bound by hand, and a tiny run.  Nothing here depends on how long anything takes."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.run import main
from benchmarks.studies.all_reduce_model import CASE, FITTED, Within
from mgpu_core.tools.bench.case import Row

TINY = ["all_reduce_model", "--ranks", "2", "--sizes", "16K,32K", "--repeats", "3"]


def row(size, measured, predicted, algorithm="auto"):
    return Row({"ranks": 2, "size": size, "algorithm": algorithm}, {"ours": [measured], "model": [predicted]})


@pytest.mark.parametrize(
    ("of", "value", "held"),
    [("median", 1.25, True), ("each", 2.5, False)],
)
def test_the_bound_counts_both_ways(of, value, held):
    rows = [row(1, 2.0, 2.5), row(2, 2.5, 1.0), row(3, 1.0, 1.0), row(4, 1.0, 9.0, "ring")]
    verdict = Within("at most", 1.5, "model", {"algorithm": "auto"}, of).judge(rows)
    assert (verdict.value, verdict.held) == (pytest.approx(value), held)
    assert verdict.text == f"algorithm auto: predicted within 1.5x of measured, {of} of the sizes"


def test_a_bound_without_a_row_is_not_measured():
    assert CASE.bounds[0].judge([row(1, 1.0, 1.0, "ring")]).held is None


def test_the_bounds_are_those_of_the_issue():
    assert [(bound.limit, bound.of) for bound in CASE.bounds] == [(1.5, "median"), (2, "each")]


def test_a_tiny_run(capsys):
    assert main([*TINY, "--peers", "model,one_beta", "--algorithms", "auto,tree"]) == 0
    out, err = capsys.readouterr()
    head, _, *lines = [line.split("|") for line in out.splitlines() if line.startswith("|")]
    column = [cell.strip() for cell in head].index("who")
    assert [line[column].strip() for line in lines] == ["ours", "model", "one_beta"] * 4
    assert "fitted: call " in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--sizes", "48K"], f"{FITTED[1]} bytes is a size of the fit"),
        (["--sizes", "1025"], "wanted multiples of 4 bytes, got 1025"),
        (["--ranks", "9"], "--ranks: wanted 2 to 8"),
    ],
)
def test_a_request_that_cannot_be_served_is_status_2(capsys, change, message):
    assert main([*TINY, *change]) == 2
    assert message in capsys.readouterr().err
