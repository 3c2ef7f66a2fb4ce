"""Plans against the theory: every micro-batch once each way, in order, within the bubble and the memory bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_core.pipeline.schedules import BACKWARD, FORWARD, bubble, plan

SIZES = st.integers(1, 6)
SCHEDULE = st.sampled_from(["1f1b", "gpipe"])


def held(actions, stage):
    """The largest number of micro-batches that a stage holds between forward and backward."""
    now = most = 0
    for action in actions:
        if action.stage == stage:
            now += 1 if action.kind == FORWARD else -1
            most = max(most, now)
    return most


@settings(deadline=None)  # a busy machine is not what is tested
@given(SIZES, st.integers(1, 12), SCHEDULE)
def test_every_micro_batch_goes_once_each_way(stages, micro_batches, schedule):
    actions = plan(stages, micro_batches, schedule)
    found = [(action.stage, action.kind, action.micro_batch) for action in actions]
    every = {(s, kind, m) for s in range(stages) for kind in (FORWARD, BACKWARD) for m in range(micro_batches)}
    assert len(found) == len(every)
    assert set(found) == every
    for stage in range(stages):
        for kind in (FORWARD, BACKWARD):
            order = [action.micro_batch for action in actions if (action.stage, action.kind) == (stage, kind)]
            assert order == list(range(micro_batches))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 9), SCHEDULE)
def test_nothing_runs_before_its_values_are_there_and_no_worker_does_two_things(workers, micro_batches, schedule):
    stages = len(workers)
    actions = plan(stages, micro_batches, schedule, workers)
    time = {(action.kind, action.stage, action.micro_batch): action.time for action in actions}
    for (kind, stage, micro_batch), when in time.items():
        if kind == FORWARD:
            before = (FORWARD, stage - 1, micro_batch)
        else:
            before = (BACKWARD, stage + 1, micro_batch) if stage < stages - 1 else (FORWARD, stage, micro_batch)
        assert time.get(before, -1) < when
    slots = [(action.time, workers[action.stage]) for action in actions]
    assert len(set(slots)) == len(slots)
    assert [action.time for action in actions] == sorted(action.time for action in actions)


@given(SIZES, st.integers(1, 12), SCHEDULE)
def test_the_bubble_is_that_of_the_theory(stages, micro_batches, schedule):
    found = bubble(plan(stages, micro_batches, schedule), stages)
    assert found == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@given(SIZES, st.integers(1, 12))
def test_1f1b_holds_at_most_as_many_micro_batches_as_stages_follow(stages, micro_batches):
    one, all_first = (plan(stages, micro_batches, schedule) for schedule in ("1f1b", "gpipe"))
    for stage in range(stages):
        assert held(one, stage) == min(stages - stage, micro_batches)
        assert held(all_first, stage) == micro_batches


def test_two_stages_of_a_device_make_a_smaller_bubble():
    assert bubble(plan(4, 8, workers=[0, 1, 0, 1]), 2) == pytest.approx(1 / 17)
    assert bubble(plan(2, 8), 2) == pytest.approx(1 / 9)


@pytest.mark.parametrize(("workers", "micro_batches", "slots"), [(3, 6, 30), (3, 12, 54), (4, 12, 58)])
def test_a_device_with_two_stages_runs_the_first_micro_batches_through_both(workers, micro_batches, slots):
    actions = plan(2 * workers, micro_batches, workers=[*range(workers)] * 2)
    assert 1 + max(action.time for action in actions) == slots


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (2, 2, "zigzag")])
def test_what_is_no_plan_is_refused(arguments):
    with pytest.raises(ValueError):
        plan(*arguments)
