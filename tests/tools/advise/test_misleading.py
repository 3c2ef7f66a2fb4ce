"""Numbers that mislead: a speed-up that no ranks can have, and the rows up to which there is no break-even."""

from pathlib import Path

from mgpu_core.tools.advise.break_even import break_even
from mgpu_core.tools.advise.recommend import Recommendation, recommend
from mgpu_core.tools.advise.strategies import CAPTURED, DROP_IN, ENGINE, ONE


def test_what_cannot_be_is_no_recommendation():
    """Ranks that share the work are not much faster than there are ranks: one device was held up."""
    found = recommend({ONE: 78.0, DROP_IN: 2.0, ENGINE: 1.0}, ranks=2, gpus=2, loader_s=3.0)
    assert found == Recommendation(
        "",
        "None: TrainStep was measured as 78.0 times as fast as one device, which 2 ranks cannot be. "
        "Something else held one device up: repeat it on a quiet machine.",
    )
    assert recommend({ONE: 8.0, ENGINE: 1.0}, ranks=2).way == ENGINE  # an update in one kernel, say
    assert recommend({ONE: 8.1, DROP_IN: 1.0}, ranks=2).way == ""
    assert recommend({ONE: 8.1, DROP_IN: 1.0}, ranks=3).way == DROP_IN
    assert recommend({ONE: 9.0, ENGINE: 4.0, CAPTURED: 1.0}, ranks=2).way == CAPTURED  # whose launches one device pays
    assert recommend({DROP_IN: 9.0, ENGINE: 1.0}, ranks=2).way == ENGINE


def test_a_step_that_takes_longer_than_one_with_more_rows_was_held_up():
    found = recommend({ONE: 0.628, DROP_IN: 0.356}, of_more_rows={ONE: 0.107})
    assert found == Recommendation(
        "",
        "None: one device took 628 ms, and with more rows 107 ms. Something else held it up: repeat it on a quiet "
        "machine.",
    )
    assert recommend({ONE: 0.15, DROP_IN: 0.1}, of_more_rows={ONE: 0.1, ENGINE: 0.01}).way == DROP_IN


def test_the_example_prints_no_rows_where_there_is_no_break_even():
    assert f"{break_even({16: 0.27, 64: 0.44, 256: 0.45})}" == "none up to 256 rows"
    text = (Path(__file__).parents[3] / "docs" / "advise.md").read_text()
    assert "{advice.break_even}" in text
    assert "break_even.rows" not in text
