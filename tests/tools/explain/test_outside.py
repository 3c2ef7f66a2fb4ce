"""The time of a step that is in no phase: by where it lies, and named so that its reader can act on it."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional

import mgpu_core
from mgpu_core.tools.explain.phases import outside, phases_of
from mgpu_core.tools.explain.steps import Step
from mgpu_core.trace.events import ALL_RANKS, Span

S = 10**9


def span(name, begin, end, rank=ALL_RANKS, thread=1):
    return Span(name, rank, -1, "cpu" if rank >= 0 else "", begin * S, end * S, begin * S, end * S, thread)


def parts_of(name, *events):
    step = Step(0, name, sorted(events, key=lambda each: each.host_begin_ns))
    return {each.name: each.seconds for each in outside(step, phases_of(step))}


def test_a_step_of_the_engine_by_hand():
    assert parts_of(
        "train_step",
        span("train_step", 0, 100),
        span("scatter", 2, 10),
        span("apply", 17, 60),
        *(span("forward", 20 + 10 * rank, 28 + 10 * rank, rank, 2 + rank) for rank in range(2)),
        span("update", 63, 90),
    ) == {
        "preparing": 2 + 7,  # 0 to 2, 10 to 17
        "starting ranks": 3,  # 17 to 20
        "between phases": 2 + 25,  # 28 to 30, 38 to 63
        "after the last phase": 10,  # 90 to 100
    }


def test_a_step_of_the_wrapper_by_hand():
    """The script's own part lies between the return of the forward and the last of the backward."""
    assert parts_of(
        "data_parallel",
        span("data_parallel", 0, 50),
        span("forward", 10, 40, 0),
        span("gather", 41, 48),
        span("scatter (backward)", 70, 71),
        span("reduce", 75, 80),
    ) == {"preparing": 10, "between phases": 1 + 2, "your script": 20 + 4}


def test_calls_of_no_step_have_the_script_between_them():
    assert parts_of("calls", span("scatter", 0, 10), span("gather", 30, 31)) == {"your script": 20}


def test_a_rank_inside_of_which_others_start_begins_with_its_own_forward():
    inner = [span("apply", 25, 35, thread=2), span("forward", 26, 34, 1, 3)]
    found = parts_of("train_step", span("train_step", 0, 50), span("forward", 20, 40, 0, 2), *inner)
    assert found == {"preparing": 20, "after the last phase": 10}


def test_what_the_script_does_between_forward_and_backward_is_its_own():
    model = mgpu_core.DataParallel(nn.Linear(4, 2), ["cpu"] * 2)
    with mgpu_core.explain() as trace:
        output = model(torch.ones(6, 4))
        time.sleep(0.05)
        output.sum().backward()
    shares = {each.name: each.seconds for each in outside(trace.step(), phases_of(trace.step()))}
    assert shares["your script"] >= 0.05
    assert "your script: no phase; code outside of mgpu_core's calls" in trace.table()


@pytest.mark.several_ranks
@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_a_step_tells_what_it_takes_to_start_its_ranks(ranks, workers):
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = mgpu_core.TrainStep(net, functional.mse_loss, optimizer, ["cpu"] * ranks, workers=workers)
    with mgpu_core.explain() as trace:
        step(torch.ones(3 * ranks, 4), torch.ones(3 * ranks, 2))
    step.close()
    parts = [each.name for each in outside(trace.step(), phases_of(trace.step()))]
    assert parts == ["preparing", "starting ranks", "between phases", "after the last phase"]


@pytest.mark.parametrize(("options", "shown"), [
    ({}, "check of gradients"),
    ({"clip_norm": 1.0}, "l2_norm"),
    ({"clip_norm": 1.0, "error_if_nonfinite": False}, "l2_norm"),
    ({"error_if_nonfinite": False}, None),
])  # fmt: skip
def test_the_norm_is_named_by_its_use(options, shown):
    net = nn.Linear(4, 2)
    step = mgpu_core.TrainStep(net, functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1), ["cpu"] * 2, **options)
    with mgpu_core.explain(skip=1) as trace:
        for _ in range(2):
            step(torch.ones(6, 4), torch.ones(6, 2))
    step.close()
    names = {each.name for each in phases_of(trace.step())}
    assert names & {"check of gradients", "l2_norm"} == ({shown} if shown else set())
    assert (f"\n{shown}: " in trace.table()) == (shown is not None)


def test_a_column_without_a_value_is_left_out():
    net = nn.Linear(4, 2)
    step = mgpu_core.TrainStep(net, functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1), ["cpu"])
    with mgpu_core.explain() as trace:
        step(torch.ones(6, 4), torch.ones(6, 2))
    step.close()
    text = trace.table()
    (head,) = [line for line in text.splitlines() if line.startswith("phase")]
    assert head.split() == ["phase", "ranks", "time", "share"]
    assert "bus GB/s" not in text
