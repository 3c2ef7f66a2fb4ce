"""The order of the turns, and the numbers that are made of the times."""

import pytest

from mgpu_core.tools.bench.timing import (
    Contestant,
    Timing,
    WrongResult,
    alternate,
    contest,
    median,
    p90,
    ratio,
    significant,
    timed,
)

pytestmark = pytest.mark.slow


class Trace:
    """Contestants that write down what happens to them; their times count up."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def contestant(self, name: str, wrong: int = 0) -> Contestant:
        def run() -> float:
            self.steps.append(f"run {name}")
            return float(len(self.steps))

        def check() -> int:
            self.steps.append(f"verify {name}")
            return wrong

        return Contestant(run, check, lambda: self.steps.append(f"prepare {name}"))


def test_contestants_take_turns() -> None:
    trace = Trace()
    sides = {name: trace.contestant(name) for name in "ABC"}
    seconds = alternate(sides, Timing(repeats=2, warmup=0, flush=lambda: trace.steps.append("flush")))
    turns = [step for step in trace.steps if step.startswith("run")]
    assert turns == ["run A", "run B", "run C"] * 2
    assert trace.steps[:3] == ["prepare A", "flush", "run A"]
    assert list(seconds) == ["A", "B", "C"]
    assert seconds["B"] == [6.0, 15.0]


def test_warm_up_is_not_kept() -> None:
    trace = Trace()
    seconds = alternate({"A": trace.contestant("A")}, Timing(repeats=2, warmup=3))
    assert trace.steps.count("run A") == 5
    assert seconds["A"] == [8.0, 10.0]


def test_all_are_verified_before_and_after() -> None:
    trace = Trace()
    contest({name: trace.contestant(name) for name in "AB"}, Timing(repeats=1, warmup=0))
    assert trace.steps[:2] == ["verify A", "verify B"] == trace.steps[-2:]


def test_who_is_wrong_is_not_timed() -> None:
    trace = Trace()
    with pytest.raises(WrongResult, match="B: 3 wrong values"):
        contest({"A": trace.contestant("A"), "B": trace.contestant("B", wrong=3)}, Timing(repeats=1))
    assert not any(step.startswith("run") for step in trace.steps)


def test_who_becomes_wrong_is_found() -> None:
    answers = iter([0, 1])
    side = Contestant(lambda: 1.0, lambda: next(answers))
    with pytest.raises(WrongResult, match=r"A: 1 wrong value$"):
        contest({"A": side}, Timing(repeats=1))


def test_the_clock_is_around_the_work_alone() -> None:
    steps: list[str] = []
    run = timed(
        lambda: steps.append("work"), synchronize=lambda: steps.append("wait"), wake=lambda: steps.append("wake")
    )
    assert run() >= 0
    assert steps == ["wake", "wait", "work", "wait"]


@pytest.mark.parametrize(
    ("seconds", "middle", "ninth"),
    [([3.0], 3.0, 3.0), ([2.0, 1.0], 1.5, 1.9), (list(range(11)), 5, 9), ([1.0, 1.0, 100.0], 1.0, 80.2)],
)
def test_median_and_p90(seconds: list[float], middle: float, ninth: float) -> None:
    assert median(seconds) == pytest.approx(middle)
    assert p90(seconds) == pytest.approx(ninth)


def test_a_ratio_above_1_means_that_we_are_faster() -> None:
    seconds = {"ours": [1.0, 2.0, 90.0], "gloo": [12.0, 11.0, 13.0]}
    assert ratio(seconds, "gloo") == 6.0


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12346"), (98.76543, "98.77"), (1.0, "1.000"), (0.00123456, "0.001235"), (0, "0")]
)
def test_four_digits_count(value: float, text: str) -> None:
    assert significant(value) == text
