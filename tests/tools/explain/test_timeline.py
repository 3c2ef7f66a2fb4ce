"""The timeline of a pipeline: each action once, the bytes on the borders, and idle shares."""

import pytest
import torch
from fakes.stacks import mse
from torch import nn

from mgpu_core import Pipeline, TrainStep, explain, optim
from mgpu_core.pipeline.schedules import plan
from mgpu_core.tools.explain.page import page_data
from mgpu_core.tools.explain.steps import Step
from mgpu_core.tools.explain.timeline import timelines_of
from mgpu_core.trace.events import Schedule, Span


def recorded(call):
    with explain() as trace:
        call()
    return trace


def training(stages=2, chunks=3):
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages)))
    pipeline = Pipeline(net, ["cpu"] * stages, chunks=chunks)
    step = TrainStep(pipeline, mse, optim.SGD(net.parameters(), lr=0.1))
    return lambda: step(torch.ones(6, 4), torch.ones(6, 4))


def test_a_training_step_has_its_plan_and_each_action_once():
    trace = recorded(training(3, 3))
    step = page_data(trace)["steps"][-1]
    (data,) = step["pipelines"]
    actions = plan(3, 3)
    assert data["ideal"] == [list(action) for action in actions]
    assert data["slots"] == 1 + max(action.time for action in actions)
    lanes = [lane["bars"] for lane in step["lanes"] if lane["name"].startswith("stage")]
    bars = [(stage, bar["name"], bar["bucket"]) for stage, lane in enumerate(lanes) for bar in lane]
    assert sorted(bars) == sorted(action[1:] for action in actions)
    assert all(0 <= bar["begin"] <= bar["end"] <= step["us"] for lane in lanes for bar in lane)
    assert data["stages"] == ["cpu"] * 3
    both_ways = "96 B forward, 96 B backward"  # 6 rows, 4 columns, 4 bytes of float32
    assert data["about"][1:] == [f"stage 0 to stage 1: {both_ways}", f"stage 1 to stage 2: {both_ways}"]


def test_the_table_says_stages_idle_shares_and_borders():
    text = recorded(training()).table()
    assert "2 stages (cpu, cpu)" in text
    assert "pipeline: 2 stages, 3 micro-batches; idle" in text
    assert "25.0% by the schedule" in text  # one slot in four: 2 (s - 1) of 2 (m + s - 1)
    assert "stage 0 to stage 1: 96 B forward, 96 B backward" in text


def test_what_gets_no_gradient_crosses_forward_alone():
    class Deaf(nn.Linear):
        def forward(self, x):
            return super().forward(torch.ones(x.shape))

    net = nn.Sequential(nn.Linear(4, 4), Deaf(4, 4))
    step = TrainStep(Pipeline(net, ["cpu"] * 2, chunks=3), mse, optim.SGD(net.parameters(), lr=0.1))
    (found,) = timelines_of(recorded(lambda: step(torch.ones(6, 4), torch.ones(6, 4))).step())
    assert found.schedule.borders == ((0, 1, 96, 0),)


def test_a_first_call_that_begins_again_counts_its_bytes_once():
    class Again(nn.Module):
        """The first try finds that a layer is called a second time, after one of the next stage."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.first(self.second(self.first(x)))

    net = Again()
    pipeline = Pipeline(net, ["cpu"] * 2, split_points=["second"], chunks=3)
    step = TrainStep(pipeline, mse, optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        (found,) = timelines_of(recorded(lambda: step(torch.ones(6, 4), torch.ones(6, 4))).step())
        assert found.schedule.borders == ((0, 1, 96, 96),)


def test_a_forward_of_its_own_is_all_forwards_first():
    net = Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ["cpu"] * 2, chunks=3)
    trace = recorded(lambda: net(torch.ones(6, 4)))
    (data,) = page_data(trace)["steps"][0]["pipelines"]
    slots = [[stage + batch, stage, "forward", batch] for batch in range(3) for stage in range(2)]
    assert sorted(data["ideal"]) == sorted(slots)
    assert "25.0% by the schedule" in data["about"][0]


def span(rank, batch, begin, end):
    return Span("forward", rank, batch, "cpu", begin, end, begin, end, 0)


@pytest.mark.parametrize(("workers", "idle"), [((0, 1), 1 - 60 / 80), ((0, 0), 1 - 40 / 40)])
def test_idle_is_the_time_in_which_a_worker_runs_no_action(workers, idle):
    spans = [span(0, 0, 100, 110), span(0, 1, 110, 130), span(1, 0, 110, 140)]
    schedule = Schedule(((0, 0, "forward", 0), (1, 0, "forward", 1), (1, 1, "forward", 0)), workers, (), 200, 0)
    (found,) = timelines_of(Step(0, "pipeline", [*spans, schedule]))
    assert found.idle == pytest.approx(idle)
