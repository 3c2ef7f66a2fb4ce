"""A call of several ranks: what lanes wait for, and that no wait outlives what can fulfil it."""

import threading
import time

import pytest
import torch
from fakes.nets import cpu

from mgpu_core import Error
from mgpu_core.devices.time_limits import TIMEOUT_VARIABLE
from mgpu_core.ranks.run import Run, current_lane
from mgpu_core.ranks.team import Team
from mgpu_core.ranks.waiting import Waiting


def run_of(ranks, **settings):
    return Run(Team.of(cpu(ranks)), **settings)


def run(ranks, work, **settings):
    """What ``work(lane, rank)`` returns in each lane."""
    return run_of(ranks, **settings).run(
        [lambda rank=rank: work(current_lane(), rank) for rank in range(ranks)], draws=None, workers="threads"
    )


@pytest.fixture
def soon(monkeypatch):
    """Waits end after a short time."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")


@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_results_come_in_the_order_of_the_lanes(ranks, workers):
    def work(rank):
        time.sleep(0.002 * (ranks - rank))
        return rank * rank

    calls = [lambda rank=rank: work(rank) for rank in range(ranks)]
    assert run_of(ranks).run(calls, draws=None, workers=workers) == [rank * rank for rank in range(ranks)]


def test_a_single_lane_and_those_in_the_caller_have_no_lane():
    here = threading.get_ident()
    assert run(1, lambda lane, _: (lane, threading.get_ident())) == [(None, here)]
    found = run_of(3).run([current_lane] * 3, draws=None, workers="caller")
    assert found == [None, None, None]


def test_there_are_never_fewer_threads_than_lanes():
    with pytest.raises(ValueError, match="there are 3 calls, and 2 ranks to run them"):
        run_of(2).run([int] * 3, draws=None, workers="threads")
    assert len(set(run(8, lambda *_: threading.get_ident()))) == 8


@pytest.mark.several_ranks
def test_values_meet_in_rank_order_whoever_comes_last(ranks):
    for last in range(ranks):

        def work(lane, rank, last=last):
            time.sleep(0.02 * (rank == last))
            return lane.meet("key", f"of {rank}", lambda values: [(*values, each) for each in range(ranks)])

        everyone = tuple(f"of {rank}" for rank in range(ranks))
        assert run(ranks, work) == [(*everyone, rank) for rank in range(ranks)]


@pytest.mark.several_ranks
def test_the_bits_of_a_sum_do_not_depend_on_who_comes_last(ranks):
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]

    def work(lane, rank, late):
        time.sleep(0.01 * (rank == late))
        return lane.meet("sum", values[rank], lambda given: [sum(given)] * ranks)

    found = [run(ranks, lambda lane, rank, late=late: work(lane, rank, late))[0] for late in range(ranks)]
    assert all(torch.equal(each, found[0]) for each in found)


def test_meetings_under_one_key_are_paired_by_their_number():
    def work(lane, rank):
        return [lane.meet("key", (rank, i), lambda values: [values] * 3) for i in range(20)]

    assert run(3, work) == [[[(0, i), (1, i), (2, i)] for i in range(20)]] * 3


def test_a_failure_to_combine_is_every_lanes():
    told = []

    def work(lane, _):
        try:
            lane.meet("key", None, lambda _: 1 / 0)
        except ZeroDivisionError as error:
            told.append(str(error))
        return lane.meet("key", 1, lambda values: values)  # and they can meet again

    assert run(3, work) == [1, 1, 1]
    assert told == ["division by zero"] * 3


def test_a_lane_that_fails_or_leaves_ends_a_meeting():
    def fails(lane, rank):
        if rank == 1:
            raise KeyError("of rank 1")
        return lane.meet("key", rank, lambda values: values)

    with pytest.raises(KeyError, match="Caught KeyError in replica 1"):
        run(3, fails)
    with pytest.raises(Error, match="rank 2 ended without coming to a layer where all ranks meet"):
        run(3, lambda lane, rank: None if rank == 2 else lane.meet("key", rank, lambda values: values))


@pytest.mark.usefixtures("soon")
def test_a_meeting_that_is_late():
    def work(lane, rank):
        if rank == 0:
            return lane.meet("key", rank, lambda values: values)
        time.sleep(0.6)
        return None

    with pytest.raises(Error, match=r"did not (come to a synchronised layer|end) within 0\.3 s"):
        run(2, work)


@pytest.mark.usefixtures("soon")
def test_a_lane_ends_while_another_still_makes_their_meeting():
    waiting, made, ended = Waiting({}, []), threading.Event(), []

    def last():
        waiting.begin(1)
        waiting.meet("key", 1, None, lambda values: made.wait(20) and values, 2)
        waiting.end(1)

    def first():
        waiting.begin(0)
        with pytest.raises(Error, match=r"did not come to a synchronised layer within 0\.3 s"):
            waiting.meet("key", 0, None, lambda values: values, 2)
        waiting.end(0)
        ended.append(0)

    threads = [threading.Thread(target=first), threading.Thread(target=last)]
    threads[0].start()
    time.sleep(0.1)  # it is the first to come
    threads[1].start()
    threads[0].join(20)
    assert ended == [0]
    assert waiting.stop(0.1) is False  # the other is at work
    made.set()
    threads[1].join(20)
    assert waiting.stop(20) is True


PLAN = ["F0", "F1", "B0", "F2", "B1", "B2"]


@pytest.mark.parametrize("lanes", [1, 3])
def test_turns_come_in_the_order_of_the_plan(lanes):
    done = []

    def work(lane, rank):
        if lane is None:
            return
        for kind in "FB":
            time.sleep(0.002 * (lanes - rank))
            lane.turn("stage", f"{kind}{rank}")
            done.append(f"{kind}{rank}")
        lane.end_turn()

    run(lanes, work, plans={"stage": PLAN})
    assert done == (PLAN if lanes == 3 else [])


def test_without_a_plan_one_lane_at_a_time_is_served():
    inside, most = [], []

    def work(lane, rank):
        for _ in range(50):
            lane.turn("stage")
            inside.append(rank)
            most.append(len(inside))
            inside.remove(rank)
            lane.end_turn()

    run(8, work)
    assert (max(most), len(most)) == (1, 400)


def test_who_comes_first_is_served_first():
    served = []

    def work(lane, rank):
        time.sleep(0.03 * (3 - rank))
        lane.turn("stage")
        served.append(rank)
        time.sleep(0.1 * (rank == 2))  # the others come meanwhile

    run(3, work)
    assert served == [2, 1, 0]


def test_the_next_turn_ends_the_one_before():
    ways = []

    def work(lane, rank):
        for stage in range(3):
            lane.turn(stage, rank)
            ways.append((stage, rank))

    run(2, work, plans={stage: [1, 0] for stage in range(3)})
    assert [rank for stage, rank in ways if stage == 0] == [1, 0]
    assert [rank for stage, rank in ways if stage == 2] == [1, 0]


@pytest.mark.parametrize("plans", [None, {"stage": [1, 0, 2]}])
def test_a_turn_ends_with_its_lane_and_a_failure_ends_the_waiting(plans):
    began = []

    def work(lane, rank):
        time.sleep(0.05 * (rank != 1))
        lane.turn("stage", rank if plans else None)
        began.append(rank)
        time.sleep(0.15 * (rank == 1))
        if rank == 1:
            raise ArithmeticError("inside its turn")

    with pytest.raises(ArithmeticError, match="in replica 1"):
        run(3, work, plans=plans)
    assert began == [1]
    assert run(3, lambda lane, rank: lane.turn("stage")) == [None] * 3  # each ends with its lane


def test_a_turn_that_no_plan_has():
    with pytest.raises(ValueError, match="the plan of stage 0 has no turn F7 left"):
        run(2, lambda lane, rank: lane.turn(0, f"F{7 * rank}"), plans={0: ["F0"]})


@pytest.mark.usefixtures("soon")
def test_a_turn_that_is_late():
    def work(lane, rank):
        if rank == 1:
            lane.turn("stage", "second")

    with pytest.raises(Error, match=r"turn second at stage stage did not come within 0\.3 s|did not end within"):
        run(2, work, plans={"stage": ["first", "second"]})


@pytest.mark.several_ranks
def test_what_others_have_done_is_waited_for(ranks):
    order = []

    def work(lane, rank):
        lane.wait_for([("step", earlier) for earlier in range(rank)])
        order.append(rank)
        lane.done(("step", rank))

    run(ranks, work)
    assert order == list(range(ranks))


@pytest.mark.usefixtures("soon")
def test_what_is_not_done_is_named():
    def work(lane, rank):
        if rank == 1:
            lane.wait_for(["the forward", "the backward"])
        lane.done("the forward")

    with pytest.raises(Error, match=r"the backward was not done within 0\.3 s|did not end within"):
        run(2, work)


def test_stop_wakes_every_waiting_lane_and_waits_for_those_at_work():
    this, ended = run_of(4), []

    def works():
        time.sleep(0.3)
        ended.append("works")

    def waits(how):
        try:
            how(current_lane())
        finally:
            ended.append("waits")

    calls = [
        works,
        lambda: waits(lambda lane: lane.wait_for(["nothing"])),
        lambda: waits(lambda lane: lane.turn("stage", "second")),
        lambda: waits(lambda lane: lane.meet("key", 0, lambda values: values)),
    ]
    this = run_of(4, plans={"stage": ["first", "second"]})
    told = []

    def call():
        try:
            this.run(calls, draws=None, workers="threads")
        except Error as error:
            told.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.1)
    assert not this.stop(0.0)
    assert this.stop(10.0)
    assert sorted(ended) == ["waits", "waits", "waits", "works"]
    caller.join(10)
    assert len(told) == 1


def test_after_a_stop_no_lane_begins():
    this = run_of(2)
    began = []
    this.run([int, int], draws=None, workers="threads")
    assert this.stop(0.0)
    waiting = run_of(2)
    assert waiting.stop(0.0)  # nobody is at work yet
    assert waiting.run([lambda: began.append(1)] * 2, draws=None, workers="threads") == [None, None]
    assert began == [1, 1]
