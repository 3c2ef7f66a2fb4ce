"""Shares that follow the ranks' speeds: decisions from times that the tests make up."""

import contextlib

import pytest
import torch
from fakes.nets import cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from step.nets import Linear, mse
from torch.optim import SGD

from mgpu_core import TrainStep
from mgpu_core.step.split_plan import SAMPLES, WARM_UP, AutoShares, _capped, _room_for_rows


def watch(auto, rows, seconds, steps, room=None):
    """Whether the shares have changed in so many steps."""
    found = [auto.observe(rows, seconds, room or [None] * len(rows)) for _ in range(steps)]
    return any(found)


def test_equal_ranks_stay_equal():
    auto = AutoShares(2)
    assert not watch(auto, [8, 8], [1.0, 1.04], 50)
    assert auto.shares == [0.5, 0.5]


def test_a_faster_rank_gets_more_and_then_all_stays():
    auto = AutoShares(2)
    assert not watch(auto, [8, 8], [1.0, 3.0], WARM_UP + SAMPLES - 1)
    assert watch(auto, [8, 8], [1.0, 3.0], 1)
    assert auto.shares == [0.75, 0.25]
    assert not watch(auto, [12, 4], [1.5, 1.5], 50)
    assert auto.shares == [0.75, 0.25]


def test_a_split_that_is_no_faster_is_taken_back_and_tried_again_later():
    """Where each step takes as long, whatever its rows."""
    auto = AutoShares(2)
    assert watch(auto, [8, 8], [1.0, 1.5], WARM_UP + SAMPLES)
    assert auto.shares == pytest.approx([0.6, 0.4])
    assert not watch(auto, [10, 6], [1.0, 1.5], WARM_UP + SAMPLES - 1)
    assert watch(auto, [10, 6], [1.0, 1.5], 1)
    assert auto.shares == [0.5, 0.5]
    assert not watch(auto, [8, 8], [1.0, 1.5], WARM_UP + 2 * SAMPLES - 1)
    assert watch(auto, [8, 8], [1.0, 1.5], 1)
    assert watch(auto, [10, 6], [1.0, 1.5], WARM_UP + 2 * SAMPLES)
    assert not watch(auto, [8, 8], [1.0, 1.5], WARM_UP + 4 * SAMPLES - 1)


def test_times_that_overlap_change_nothing():
    auto = AutoShares(2)
    for i in range(50):
        assert not auto.observe([8, 8], [1.0 + i % 5, 1.6 + i % 5], [None, None])
    assert watch(auto, [8, 8], [1.0, 1.6], 2 * SAMPLES)


def test_no_rank_is_left_with_one_row():
    auto = AutoShares(2)
    assert watch(auto, [8, 8], [1.0, 99.0], WARM_UP + SAMPLES)
    assert auto.shares[1] * 16 > 1.5
    auto = AutoShares(3)
    assert watch(auto, [1, 1, 1], [1.0, 99.0, 99.0], WARM_UP + SAMPLES)
    assert auto.shares == pytest.approx([0.586, 0.207, 0.207], abs=0.01)


@settings(deadline=None)  # a busy machine is not what is tested
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8), st.floats(0, 5))
def test_ranks_of_any_speed_and_a_constant_part_come_to_rest(costs, constant):
    """Each step takes a constant time, and one in proportion to the rank's rows."""
    auto = AutoShares(len(costs))
    rows, changes, slowest = [64] * len(costs), [], []
    for step in range(400):
        times = [constant + cost * count / 64 for cost, count in zip(costs, rows, strict=True)]
        slowest.append(max(times))
        if auto.observe(rows, times, [None] * len(rows)):
            rows = [max(1, round(64 * len(costs) * share)) for share in auto.shares]
            changes.append(step)
    assert len(changes) < 20
    assert slowest[-1] <= slowest[0]


def test_one_slow_step_changes_nothing():
    auto = AutoShares(2)
    for i in range(40):
        assert not auto.observe([8, 8], [1.0, 9.0 if i % SAMPLES == 0 else 1.0], [None, None])


def test_steps_that_some_ranks_miss_do_not_count():
    auto = AutoShares(3)
    assert not watch(auto, [1, 1], [1.0, 9.0], 50)
    assert not watch(auto, [8, 8, 8], [1.0, None, 9.0], 50)


def test_memory_is_a_limit():
    auto = AutoShares(2)
    assert watch(auto, [8, 8], [1.0, 3.0], WARM_UP + SAMPLES, room=[10, None])
    assert auto.shares == [10 / 16, 6 / 16]
    auto = AutoShares(2)
    assert watch(auto, [8, 8], [1.0, 1.0], WARM_UP + SAMPLES, room=[4, 100]), "too many for it, though equally fast"
    assert auto.shares == [0.25, 0.75]


def test_one_slow_rank_of_many_is_worth_a_change():
    auto = AutoShares(8)
    assert watch(auto, [8] * 8, [1.2] + [1.0] * 7, WARM_UP + SAMPLES)  # the others wait for a sixth of the time


@pytest.mark.parametrize(("device", "rows", "peak", "room"), [
    ("cuda", 10, 90, 100), ("cuda", 10, 9000, 1), ("cuda", 10, 10**6, 1), ("cuda", 10, 0, None), ("cuda", 0, 90, None),
    ("cpu", 10, 90, None),
])  # fmt: skip
def test_nine_tenths_of_a_gpus_memory_are_room(device, rows, peak, room, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (0, 1000))
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda _: peak)
    assert _room_for_rows(torch.device(device), rows) == room


@given(st.lists(st.tuples(st.floats(1, 100), st.none() | st.integers(1, 100)), min_size=1, max_size=8))
def test_capped_rows_are_as_many_and_within_room(ranks):
    rows, room = [count for count, _ in ranks], [limit for _, limit in ranks]
    found = _capped(list(rows), room)
    assert sum(found) == pytest.approx(sum(rows))
    if any(limit is None for limit in room) or sum(room) >= sum(rows) + 1e-6:
        assert all(limit is None or count <= limit + 1e-6 for count, limit in zip(found, room, strict=True))


def test_a_step_follows_its_clocks(monkeypatch):
    speeds = iter([])

    class Clock:
        def __init__(self, device):
            self.taken = next(speeds)

        def running(self):
            return contextlib.nullcontext()

        def seconds(self):
            return self.taken

    monkeypatch.setattr("mgpu_core.step.split_plan.RankClock", Clock)
    net, alone = Linear(), Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.01), cpu(2), shares="auto")
    assert [each.share for each in step.plan()] == [0.5, 0.5]
    assert [each.rows for each in step.plan()] == [0, 0]
    reference = SGD(alone.parameters(), lr=0.01)
    x, y = torch.randn(16, 3), torch.randn(16, 2)
    for _ in range(WARM_UP + SAMPLES + 2):
        speeds = iter([1.0, 3.0])
        step(x, y)
        reference.zero_grad()
        mse(alone(x), y).backward()
        reference.step()
    assert [(each.rank, each.share, each.rows) for each in step.plan()] == [(0, 0.75, 12), (1, 0.25, 4)]
    assert torch.allclose(net.last.weight, alone.last.weight, atol=1e-5), "the numbers are one device's all the same"
    state = step.state_dict()
    assert state["shares"] == [0.75, 0.25]
    other = Linear()
    resumed = TrainStep(other, mse, SGD(other.parameters(), lr=0.01), cpu(2), shares="auto")
    resumed.load_state_dict(state)
    assert [each.share for each in resumed.plan()] == [0.75, 0.25]


def test_shares_may_change_between_calls():
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.01), cpu(2))
    batch = torch.randn(12, 3), torch.randn(12, 2)
    for shares, rows in ((None, [6, 6]), ([2, 1], [8, 4]), ("auto", [6, 6]), (None, [6, 6])):
        step.shares = shares
        step(*batch)
        assert [each.rows for each in step.plan()] == rows
        assert step.shares == shares
    for wrong in ("fast", [1], [1, -1]):
        with pytest.raises(ValueError, match="shares"):
            step.shares = wrong
    assert step.shares is None


def test_real_clocks_are_read():
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.01), cpu(2), shares="auto")
    for _ in range(3):
        step(torch.randn(16, 3), torch.randn(16, 2))
    assert step._split_plan._timed
    assert all(clock.seconds() > 0 for clocks, _ in step._split_plan._timed for clock in clocks)


def test_other_words_are_refused():
    net = Linear()
    with pytest.raises(ValueError, match="or \"auto\", not 'fast'"):
        TrainStep(net, mse, SGD(net.parameters(), lr=0.01), cpu(2), shares="fast")
