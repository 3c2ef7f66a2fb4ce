"""A process that fails or dies: the others are told, nobody hangs, nothing is half done."""

import os
import time
from functools import partial

import pytest
import torch
from fakes.nets import whole
from processes.fragile import ONES, Fragile, batch, boom, seen_of, step_of, total, values_of
from processes.world import Ended, run
from torch import nn

import mgpu_core


def fail_once(process, guilty, phase, rank, at):
    """Three good updates around one that process `guilty` fails in; what each has seen and has."""
    acts = {}

    def loss_fn(output, target):
        if acts.get("loss") and bool((target == 9).any()):
            acts["loss"]()
        return total(output, target)

    net = Fragile(acts)
    step = step_of(net, loss_fn, bucket_nbytes=1)
    for i in range(3):
        if i == at:
            if process == guilty:
                acts[phase] = boom
            before = values_of(net)
            rows = batch(rank if process == guilty else None)
            target = rows if phase == "loss" and process == guilty else ONES
            seen = seen_of(partial(step, rows, target))
            assert all(map(torch.equal, values_of(net), before))
            assert step.steps == i
            acts.clear()
        step(batch(), ONES)
    step.check_replicas()
    return seen, values_of(net), step.steps


def undisturbed(process):
    net = Fragile({})
    step = step_of(net, bucket_nbytes=1)
    for _ in range(3):
        step(batch(), ONES)
    return values_of(net)


@pytest.fixture(scope="module")
def wanted():
    return run(undisturbed)[0]


@pytest.mark.parametrize("at", [0, 1], ids=["in the first step", "later"])
@pytest.mark.parametrize("phase", ["forward", "loss", "backward"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_process_that_fails_stops_the_update_of_all(guilty, phase, at, wanted):
    found = run(fail_once, guilty, phase, at % 2, at)
    own, others = found[guilty][0], found[1 - guilty][0]
    assert own.startswith("RuntimeError: Caught RuntimeError in replica")
    assert others.startswith(f"Error: process {guilty} gave this step up, and so did all: RuntimeError: Caught")
    for _, values, steps in found:
        assert steps == 3
        assert all(map(torch.equal, values, wanted))


def fail_while_accumulating(process):
    acts = {}
    net = Fragile(acts)
    step = step_of(net, accumulate=2)
    step(batch(), ONES)
    step(batch(), ONES)
    before, seen = values_of(net), []
    for i in range(2):
        if process == 1:
            acts["forward"] = boom
        try:
            step(batch(0 if process == 1 and i == 0 else None), ONES)
        except Exception as error:
            seen.append((i, type(error).__name__))
            break
    acts.clear()
    assert all(map(torch.equal, values_of(net), before))
    step(batch(), ONES)
    step(batch(), ONES)
    step.check_replicas()
    return seen, step.steps


def test_a_failure_inside_a_window_drops_the_window_of_all():
    found = run(fail_while_accumulating)
    assert found == [([(1, "Error")], 2), ([(0, "RuntimeError")], 2)]


def not_finite(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net, ranks=1)
    before = values_of(net)
    try:
        step(torch.full((2, 2), float("nan") if process == 1 else 1.0), ONES[:2])
    except FloatingPointError as error:
        seen = str(error)
    kept = all(map(torch.equal, values_of(net), before))
    step(ONES, ONES)
    return seen, kept, step.steps


def test_a_gradient_that_is_not_finite_stops_all():
    (seen, kept, steps), (own, *same) = run(not_finite)
    assert "finite in this process, but their sum over 2 processes is not" in seen
    assert "the gradient of weight is not finite on rank 0" in own
    assert [kept, steps] == same == [True, 1]


def die(process, guilty):
    net = Fragile({"backward": lambda: os._exit(7)} if process == guilty else {})
    step = step_of(net)
    step(batch(), ONES)
    before = values_of(net)
    begin = time.monotonic()
    texts = []
    for _ in range(2):
        try:
            step(batch(1 if process == guilty else None), ONES)
        except mgpu_core.Error as error:
            texts.append(str(error))
    return texts, all(map(torch.equal, values_of(net), before)), time.monotonic() - begin < 20


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_process_that_dies_is_named(guilty):
    found = run(die, guilty, may_end=True)
    assert isinstance(found[guilty], Ended)
    assert found[guilty].status == 7
    texts, kept, soon = found[1 - guilty]
    assert kept
    assert soon
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"process {1 - guilty} of 2 was left alone: process {guilty} (pid ")
    assert "parameters are those of the last update: start all processes again from the last checkpoint" in texts[0]


def no_memory(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)
    if process == 1:
        step._loop.reducer.lay_out = lambda *_: boom()
    begin = time.monotonic()
    first, second = (seen_of(lambda: step(ONES, ONES)) for _ in range(2))
    soon = time.monotonic() - begin < 20
    step.rebuild()
    step(ONES, ONES)
    return first, second, soon, values_of(net), step.steps


def test_a_process_that_cannot_lay_its_gradients_out():
    other, guilty = run(no_memory)
    assert guilty[0] == "RuntimeError: boom at a rank"
    assert other[0].startswith("Error: process 1 gave this step up, and so did all: RuntimeError: boom at a rank")
    for _, second, soon, values, steps in (other, guilty):
        assert "could not be laid out in all processes: call step.rebuild()" in second
        assert soon
        assert all(map(torch.equal, values, guilty[3]))
        assert steps == 1


def hook_fails(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)

    def hook(bucket):
        if process == 1 and step.steps == 1:
            boom()
        torch.distributed.all_reduce(bucket.tensors[0], group=bucket.group)

    step.register_comm_hook(hook)
    return [seen_of(lambda: step(ONES, ONES)) for _ in range(3)]


def test_a_hook_that_fails_in_one_process_ends_all():
    other, guilty = run(hook_fails)
    assert guilty[:2] == ["nothing", "RuntimeError: boom at a rank"]
    assert "a communication hook failed in process 1 (RuntimeError)" in guilty[2]
    assert other[0] == "nothing"
    assert other[1] != "nothing"


def update_fails(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)
    step(ONES, ONES)
    if process == 1:
        step._loop.optimizer_step.prepare = lambda *_: boom()
    return [seen_of(lambda: step(ONES, ONES)) for _ in range(2)]


def test_an_update_that_fails_behind_the_decision_says_so():
    (first, second), guilty = run(update_fails)
    assert first == "nothing"
    assert second != "nothing"  # the other one is gone
    assert guilty[0] == "RuntimeError: boom at a rank"
    assert "its update failed after all processes had agreed on it (RuntimeError)" in guilty[1]
