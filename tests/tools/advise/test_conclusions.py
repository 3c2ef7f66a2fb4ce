"""What follows from the numbers: break-even, shares, reason, recommendation, all by hand-made numbers."""

import pytest
import torch

from mgpu_core.tools.advise.break_even import BreakEven, break_even
from mgpu_core.tools.advise.data import Measurement
from mgpu_core.tools.advise.host_share import HostShare
from mgpu_core.tools.advise.reasons import COMMUNICATION, COMPUTE, IMBALANCE, INPUT, LAUNCH, UNKNOWN, UPDATE, reason_of
from mgpu_core.tools.advise.recommend import Recommendation, recommend
from mgpu_core.tools.advise.shares import StepShares, Times, shares_of, times_of
from mgpu_core.tools.advise.strategies import CAPTURED, DROP_IN, ENGINE, ONE
from mgpu_core.tools.advise.surroundings import busy_notes
from mgpu_core.tools.advise.text import spread
from mgpu_core.tools.explain.phases import covered
from mgpu_core.tools.explain.steps import Step
from mgpu_core.trace.events import ALL_RANKS, NO_BUCKET, Collective, Span


@pytest.mark.parametrize(
    ("speedups", "found"),
    [
        ({}, BreakEven("unknown")),
        ({16: 1.2, 64: 1.5}, BreakEven("below", 16.0)),
        ({16: 0.5, 64: 1.0}, BreakEven("none", 64.0)),
        ({16: 1.5, 64: 0.9}, BreakEven("none", 64.0)),  # one lucky batch is no break-even
    ],
)
def test_break_even_outside_of_what_was_measured(speedups, found):
    assert break_even(speedups) == found


def test_break_even_lies_on_a_line_over_the_logarithm():
    found = break_even({16: 0.5, 64: 1.5, 256: 2.0})
    assert found.kind == "at"
    assert found.rows == pytest.approx(32)  # the middle of 16 and 64
    assert break_even({4: 1.1, 16: 0.8, 64: 2.0}).rows == pytest.approx(16 * 4 ** (0.2 / 1.2))
    assert str(found).startswith("about 32 rows")


def test_intervals_cover_what_they_cover_together():
    assert covered([]) == 0
    assert covered([(5, 9), (0, 4), (3, 6), (20, 21), (5, 6)]) == 10


def test_shares_by_hand():
    # rank 0      |--------|            10 to 50
    # rank 1      |------------|        10 to 70
    # sums               |--------|     60 to 90: 70 to 90 are exposed
    # update                       |-|  85 to 95
    times = Times((0, 100), [[(10, 30), (30, 50)], [(10, 70)]], [(60, 90)], [(85, 95)])
    found = shares_of(times)
    assert (found.compute_share, found.exposed_share) == (0.6, 0.2)
    assert (found.update_share, found.overhead_share) == (0.05, 0.15)
    assert found.step_s == pytest.approx(100e-9)
    assert found.imbalance == pytest.approx(60 / 50 - 1)
    assert found.waiting_share == pytest.approx(0.1)


def test_a_step_without_ranks_has_shares():
    found = shares_of(Times((0, 10), [], [], []))
    assert (found.overhead_share, found.imbalance) == (1.0, 0.0)


def span(step, rank, begin, end, device="", host=None):
    return Span(step, rank, NO_BUCKET, device, begin, end, *(host or (begin, end)), 1)


def test_times_of_a_recorded_step():
    summed = Collective("reduce", "ring", (0, 1), (8, 8), ("cuda:0", "cuda:1"), (), {"cuda:0": (70, 90)}, 61, 62, 1)
    entries = [
        span("train_step", ALL_RANKS, 0, 100),
        span("forward", 0, 10, 30, "cuda:0", (5, 15)),
        span("backward", 0, 30, 50, "cuda:0", (15, 35)),
        span("forward", 1, 10, 70, "cuda:1", (5, 35)),
        span("all_reduce", ALL_RANKS, 60, 65),
        summed,
        span("update", ALL_RANKS, 90, 95),
        span("sgd", ALL_RANKS, 91, 94),
    ]
    found = times_of(Step(0, "train_step", entries))
    assert found.whole == (0, 100)
    assert found.compute == [[(10, 30), (30, 50)], [(10, 70)]]
    assert found.sums == [(70, 90)]  # the device's times, not those of its launch
    assert found.update == [(90, 95)]
    assert found.launch_ratio == pytest.approx((10 + 20 + 30) / (20 + 20 + 60))


def test_only_cuda_has_times_of_its_own():
    entries = [span("forward", 0, 0, 4, "xpu:0"), span("backward", 0, 4, 9, "xpu:0")]
    assert times_of(Step(0, "train_step", entries)).launch_ratio is None


def test_one_backward_for_all_ranks_is_each_ranks():
    entries = [span("forward", 0, 0, 4, "cpu"), span("forward", 1, 0, 5, "cpu"), span("backward", ALL_RANKS, 5, 9)]
    found = times_of(Step(0, "train_step", entries))
    assert found.compute == [[(0, 4), (5, 9)], [(0, 5), (5, 9)]]
    assert found.launch_ratio is None


def shares(compute=0.9, exposed=0.0, overhead=0.0, waiting=0.0, launch_ratio=None, update=0.02):
    return StepShares(1.0, compute, exposed, update, overhead, 2 * waiting, waiting, launch_ratio)


@pytest.mark.parametrize(
    ("seen", "name", "words"),
    [
        (shares(exposed=0.3, overhead=0.2), COMMUNICATION, "in 30% of the step gradients are summed"),
        (shares(exposed=0.1, overhead=0.2), LAUNCH, "in 20% of the step no rank computes"),
        (shares(exposed=0.3, launch_ratio=0.95), LAUNCH, "launching takes the host 95% of the time"),
        (shares(exposed=0.3, launch_ratio=0.5), COMMUNICATION, "in 30%"),
        (shares(waiting=0.2), IMBALANCE, "computes 40% longer than the mean"),
        (shares(compute=0.3, update=0.6), UPDATE, "in 60% of the step the optimizer updates, which more ranks do not"),
        (shares(compute=0.85, update=0.1), UPDATE, "in 10% of the step the optimizer updates"),
        (shares(exposed=0.3, update=0.25), COMMUNICATION, "in 30%"),
        (shares(exposed=0.09, overhead=0.05, update=0.09), COMPUTE, "some rank computes in 90% of the step"),
        (shares(exposed=0.09, overhead=0.05), COMPUTE, "some rank computes in 90% of the step"),
        (None, UNKNOWN, "no step over all ranks"),
    ],
)
def test_the_reason_is_what_takes_most(seen, name, words):
    found = reason_of(seen, ranks=2, device_count=2, best_s=1.0)
    assert found.name == name
    assert words in found.text


def test_a_recorded_step_that_is_mostly_the_update():
    entries = [
        span("train_step", ALL_RANKS, 0, 100),
        span("forward", 0, 0, 20, "cpu"),
        span("forward", 1, 0, 20, "cpu"),
        span("backward", ALL_RANKS, 20, 40),
        span("update", ALL_RANKS, 45, 95),
        span("adamw", ALL_RANKS, 46, 94),
    ]
    found = reason_of(shares_of(times_of(Step(0, "train_step", entries))), ranks=2, device_count=1, best_s=1.0)
    assert found.name == UPDATE
    assert found.text.startswith("in 50% of the step the optimizer updates")
    assert found.text.endswith("; 2 ranks share 1 device")


def test_a_slow_loader_is_the_reason_whatever_else_there_is():
    found = reason_of(shares(exposed=0.5), ranks=2, device_count=2, best_s=1.0, loader_s=3.0)
    assert (found.name, "3 times as long" in found.text) == (INPUT, True)
    assert reason_of(shares(exposed=0.5), ranks=2, device_count=2, best_s=1.0, loader_s=0.5).name == COMMUNICATION


def test_ranks_that_share_a_device_are_told_so():
    assert reason_of(shares(), ranks=4, device_count=1, best_s=1.0).text.endswith("; 4 ranks share 1 device")
    assert "share" not in reason_of(shares(), ranks=2, device_count=2, best_s=1.0).text


@pytest.mark.parametrize(
    ("medians", "way"),
    [
        ({ONE: 1.0, DROP_IN: 0.99, ENGINE: 0.97, CAPTURED: 0.96}, ONE),
        ({ONE: 1.0, DROP_IN: 0.62, ENGINE: 0.6, CAPTURED: 0.6}, DROP_IN),
        ({ONE: 1.0, DROP_IN: 0.9, ENGINE: 0.6, CAPTURED: 0.58}, ENGINE),
        ({ONE: 1.0, DROP_IN: 0.9, ENGINE: 0.6, CAPTURED: 0.3}, CAPTURED),
        ({DROP_IN: 0.9, ENGINE: 0.6}, ENGINE),  # one device failed, out of memory perhaps
    ],
)
def test_the_simplest_within_5_percent(medians, way):
    found = recommend(medians)
    assert found.way == way
    assert found.text.startswith(f"{way}: ")


def test_texts_of_recommendations():
    assert recommend({}) == Recommendation("", "None: no way could be measured.")
    assert recommend({ONE: 1.0, ENGINE: 2.0}).text == "one device: 1 s a step. Keep the plain loop."
    text = recommend({ONE: 2.0, DROP_IN: 1.03, ENGINE: 1.0}).text
    assert "1.94 times as fast as one device; TrainStep is 3% faster" in text
    text = recommend({ONE: 1.0, ENGINE: 0.5}, loader_s=0.75).text
    assert text.splitlines()[0] == (
        "First the loader: it takes 750 ms for a batch and the best step 500 ms, "
        "so more ranks will not help until loading is faster."
    )
    assert "loader" not in recommend({ONE: 1.0, ENGINE: 0.5}, loader_s=0.25).text


def test_a_slow_update_has_its_own_advice():
    medians = {ONE: 1.0, ENGINE: 0.5}
    assert "update" not in recommend(medians, reason=COMPUTE).text
    one, many = (
        recommend(medians, reason=UPDATE, device_count=device_count).text.splitlines() for device_count in (1, 4)
    )
    assert one[0] == many[0] == recommend(medians).text
    fewer = "Also fewer updates: a larger batch, or TrainStep(accumulate=4), which makes one for four batches"
    assert one[1:] == [f"{fewer}."]
    (line,) = many[1:]
    assert line.startswith(f'{fewer}; and shard="optimizer", with which each of 4 devices makes its part')


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "device_s", "gpus"),
    [(2.0, 1.0, 9.0, 3), (2.0, 1.0, 9.5, 4), (2.0, 8.0, 9.0, 0), (12.0, 12.0, 62.0, 4), (12.0, 12.0, 15.5, 0)],
)
def test_gpus_are_busy_while_the_host_asks_for_less_than_they_compute(forward_s, backward_s, device_s, gpus):
    found = HostShare(64, forward_s, backward_s, device_s)
    assert found.gpus == gpus
    assert gpus == 0 or gpus * forward_s + backward_s < device_s
    assert (gpus + 1) * forward_s + backward_s >= device_s


@pytest.mark.parametrize(("gpus", "told"), [(1, ""), (3, ""), (4, "keeps 3 of 4 GPUs busy"), (8, "keeps 3 of 8")])
def test_more_gpus_than_the_host_keeps_busy_are_told(gpus, told):
    medians, share = {ONE: 1.0, ENGINE: 0.5}, HostShare(64, 2.0, 1.0, 9.0)
    text = recommend(medians, gpus=gpus, host=share).text
    assert ("torchrun" in text) is bool(told)
    assert told in text
    none = recommend(medians, gpus=2, host=HostShare(16, 12.0, 12.0, 15.5)).text
    assert "with 16 rows each, one process keeps not even one GPU busy" in none


def test_the_spread_is_the_middle_measurements():
    rows = [Measurement(ONE, 4, (1.0, 2.0, 3.0, 4.0, 5.0)), Measurement(ENGINE, 4, (), "broken")]
    assert spread(rows) == pytest.approx(2 / 3)
    assert spread([]) == 0.0


def test_a_busy_machine_is_noted(monkeypatch):
    looks = iter([0.4, 0.6])
    monkeypatch.setattr("mgpu_core.support.busy.others_busy", lambda: next(looks))
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert busy_notes([cpu]) == []
    (note,) = busy_notes([gpu, cpu])
    assert note.startswith("other programs keep 0.6 of ")
    assert busy_notes([gpu]) == []
