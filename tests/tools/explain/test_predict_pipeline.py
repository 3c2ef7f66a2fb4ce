"""A step as a pipeline, by hand; and `mgpu simulate --pipeline`."""

import json

import pytest
import torch
from fakes.stacks import mse
from torch import nn

from mgpu_core import Pipeline, TrainStep, explain, optim
from mgpu_core.pipeline.schedules import FORWARD, plan
from mgpu_core.tools.cli import main
from mgpu_core.tools.explain.predict_pipeline import predict_pipeline, seconds_of
from mgpu_core.tools.explain.step_profile import StepProfile
from mgpu_core.tools.explain.topology import Link, Tier, Topology

UNIT = Link(1.0, (Tier(None, 0.5),))
NODE = Topology("unit", UNIT, 2, Link(3.0, (Tier(None, 1.0),)))
# Recorded on 2 ranks: 12 s forward, 24 s backward of 8 rows each; 32 bytes of all 16 rows cross a border.
STEP = StepProfile("net", 2, 16, 12.0, 24.0, 4.0, 0, 0, (), 1.0, border_nbytes=32)


def test_without_travel_and_with_equal_times_a_step_takes_its_slots():
    for stages, chunks, schedule in [(1, 3, "gpipe"), (2, 4, "1f1b"), (3, 8, "1f1b"), (4, 2, "gpipe")]:
        seconds = seconds_of(plan(stages, chunks, schedule), lambda *_: 2.0, lambda _: 0.0)
        assert seconds == 2 * 2 * (chunks + stages - 1)


def test_a_value_travels_while_both_stages_compute():
    # F: 1 s, B: 2 s, 10 s on the way
    # stage 0  F0 F1 ..................... B0(24) B1(27)
    # stage 1  .......... F0(11) B0 F1 B1(15)
    assert seconds_of(plan(2, 2), lambda _, kind: 1.0 if kind == FORWARD else 2.0, lambda _: 10.0) == 29


def test_a_step_by_hand():
    """2 stages, 4 chunks: forwards of 1.5 s, backwards of 3 s, 4 bytes on the way: 1 + 4 / 2 s."""
    found = predict_pipeline(STEP, 2, 4, NODE)
    assert found.bubble == pytest.approx(1 / 5)
    passes = found.step_s - 4 / 2 - 1.0
    assert found.idle == pytest.approx(1 - 36 / (2 * passes))
    assert passes == seconds_of(plan(2, 4), lambda _, kind: 1.5 if kind == FORWARD else 3.0, lambda _: 3.0)
    assert found.rows_per_second == pytest.approx(8 / found.step_s)
    assert found.speedup == pytest.approx(41 / found.step_s)


def test_one_gpu_is_the_step_itself():
    found = predict_pipeline(STEP, 1, 4, NODE)
    assert (found.step_s, found.speedup) == (pytest.approx(41), pytest.approx(1))
    assert found.idle == pytest.approx(0)


def test_a_border_between_nodes_takes_the_network():
    slow = Topology("slow", UNIT, 2, Link(100.0, (Tier(None, 1.0),)))
    assert predict_pipeline(STEP, 4, 4, slow).step_s > predict_pipeline(STEP, 4, 4, NODE).step_s + 2 * 97


@pytest.mark.parametrize(
    ("gpus", "chunks", "border", "message"),
    [(2, 9, 32, "9 chunks of 8 rows"), (3, 4, 32, "not a multiple"), (2, 4, 0, "--border-nbytes")],
)
def test_what_cannot_be_predicted(gpus, chunks, border, message):
    step = StepProfile("net", 2, 16, 12.0, 24.0, 4.0, 0, 0, (), 1.0, border_nbytes=border)
    with pytest.raises(ValueError, match=message):
        predict_pipeline(step, gpus, chunks, NODE)


def test_a_recorded_pipeline_is_one_module_in_parts():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    step = TrainStep(Pipeline(net, ["cpu"] * 2, chunks=3), mse, optim.SGD(net.parameters(), lr=0.1))
    with explain() as trace:
        step(torch.ones(6, 4), torch.ones(6, 2))
    profile = trace.profile()
    spans = trace.step().spans
    total = sum(each.end_ns - each.begin_ns for each in spans if each.step == "forward") / 1e9
    assert (profile.ranks, profile.rows, profile.border_nbytes) == (1, 6, 6 * 6 * 4)
    assert profile.forward_seconds == pytest.approx(total)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["simulate", "--pipeline", "--gpus", "2", "--chunks", "4,8", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [(each["gpus"], each["chunks"], each["bubble"]) for each in found["predictions"]] == [
        (2, 4, pytest.approx(1 / 5)),
        (2, 8, pytest.approx(1 / 9)),
    ]
    text = capsys.readouterr().out
    assert "pipeline, 1f1b" in text
    assert "11.1%" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chunks", "4"], "--chunks means nothing without --pipeline"),
        (["--pipeline", "--algorithm", "ring"], "--algorithm means nothing with --pipeline"),
        (["--pipeline", "--topology", "host"], "share the cores"),
        (["--pipeline", "--chunks", "0"], "--chunks 0"),
        (["--pipeline", "--border-nbytes", "-1"], "border_nbytes"),
    ],
)
def test_options_that_do_not_fit(options, message, capsys):
    assert main(["simulate", *options]) == 2
    assert message in capsys.readouterr().err
