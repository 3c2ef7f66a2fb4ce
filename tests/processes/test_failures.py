"""A process that fails or dies, or that Ctrl-C stops: the group's timeout bounds what the others wait."""

import os
import signal
import threading
import time

import pytest
import torch
from fakes.nets import whole
from processes.fragile import ONES, Fragile, batch, boom, seen_of, step_of, values_of
from processes.world import GROUP_SECONDS, Ended, run
from torch import nn

pytestmark = pytest.mark.processes

BEGUN = "Error: a step failed in this process when some of its gradients had been summed with those of the others"


def fail_before_any_sum(process):
    acts = {"forward": boom} if process == 1 else {}
    net = Fragile(acts)
    step = step_of(net)
    told = [seen_of(lambda: step(batch(0), ONES))] if process == 1 else []
    acts.clear()
    step(batch(), ONES)
    return told, values_of(net), step.steps


def test_a_process_that_fails_before_a_sum_may_go_on():
    (_, values, steps), (told, same, same_steps) = run(fail_before_any_sum)
    assert told[0].startswith("RuntimeError: Caught RuntimeError in replica 0")
    assert all(map(torch.equal, values, same))
    assert steps == same_steps == 1


def fail_between_two_sums(process):
    """The last layer's gradients have left when the first layer's backward fails."""
    acts = {}
    net = Fragile(acts)
    step = step_of(net, bucket_nbytes=1, ranks=1)
    step(batch(), ONES)
    before = values_of(net)
    if process == 1:
        acts["backward"] = boom
    told = [seen_of(lambda: step(batch(0), ONES)) for _ in range(2)]
    return told, all(map(torch.equal, values_of(net), before)), step.steps


def test_a_process_that_fails_between_two_sums_says_that_it_cannot_go_on():
    (others, kept, steps), (told, same_kept, same_steps) = run(fail_between_two_sums)
    assert "boom at a rank" in told[0]
    assert told[1].startswith(BEGUN)
    assert others[0].startswith("RuntimeError: ")  # of torch.distributed
    assert others[1].startswith(BEGUN)
    assert [kept, same_kept] == [True, True]
    assert steps == same_steps == 1


def not_finite(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net, ranks=1)
    before = values_of(net)
    seen = seen_of(lambda: step(torch.full((2, 2), float("nan") if process == 1 else 1.0), ONES[:2]))
    kept = all(map(torch.equal, values_of(net), before))
    step(ONES, ONES)
    return seen, kept, step.steps


def test_a_gradient_that_is_not_finite_stops_all():
    (seen, kept, steps), (own, *same) = run(not_finite)
    assert "weight is not finite after the sum over 2 processes; " in seen
    assert "the gradient of weight is not finite after the sum over 2 processes, nor is the loss of rank 0" in own
    assert [kept, steps] == same == [True, 1]


def die(process, guilty):
    net = Fragile({"backward": lambda: os._exit(7)} if process == guilty else {})
    step = step_of(net)
    step(batch(), ONES)
    before, began = values_of(net), time.monotonic()
    told = seen_of(lambda: step(batch(1 if process == guilty else None), ONES))
    return told, all(map(torch.equal, values_of(net), before)), time.monotonic() - began


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_process_that_dies_ends_the_others(guilty):
    found = run(die, guilty, may_end=True)
    assert isinstance(found[guilty], Ended)
    assert found[guilty].status == 7
    told, kept, seconds = found[1 - guilty]
    assert told.startswith("RuntimeError: ")
    assert kept
    assert seconds < GROUP_SECONDS + 10


def interrupt(process):
    """Ctrl-C in process 0, while it waits for process 1."""
    acts = {"forward": lambda: time.sleep(4.0)} if process == 1 else {}
    net = Fragile(acts)
    step = step_of(net)
    step(batch(), ONES)
    before = values_of(net)
    if process == 1:
        return seen_of(lambda: step(batch(0), ONES))
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    told = seen_of(lambda: step(batch(), ONES))
    seconds = time.monotonic() - began
    return told, seconds, all(map(torch.equal, values_of(net), before)), seen_of(lambda: step(batch(), ONES))


def test_ctrl_c_comes_through_while_a_process_waits():
    (told, seconds, kept, again), _ = run(interrupt)
    assert told.startswith("KeyboardInterrupt: ")
    assert seconds < 3
    assert kept
    assert again.startswith(BEGUN)


def update_fails(process):
    net = whole(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    step = step_of(net, optimizer=optimizer)
    step(ONES, ONES)
    if process == 1:
        optimizer.step = lambda *_: boom()
    return [seen_of(lambda: step(ONES, ONES)) for _ in range(2)]


def test_an_update_that_fails_behind_the_sums_says_so():
    (first, second), guilty = run(update_fails)
    assert first == "nothing"
    assert second != "nothing"  # the other one is gone
    assert guilty[0] == "RuntimeError: boom at a rank"
    assert "its update failed after the sums over all processes (RuntimeError)" in guilty[1]
