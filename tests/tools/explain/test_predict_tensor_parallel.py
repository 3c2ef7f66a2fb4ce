"""A step whose layers are cut: the prediction by hand, of a recorded step, and by the command."""

import json

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core.tools.cli import main
from mgpu_core.tools.explain.cost import all_reduce_seconds
from mgpu_core.tools.explain.predict_tensor_parallel import predict_tensor_parallel
from mgpu_core.tools.explain.scenes import scenes_of
from mgpu_core.tools.explain.step_profile import StepProfile
from mgpu_core.tools.explain.topology import parse_topology

LINKS = parse_topology("nvlink4")
STEP = StepProfile("net", 1, 8, 0.03, 0.05, 0.004, 0, 0, (), 0.002, joints=10, joint_nbytes=10_000_000)


def test_a_step_by_hand():
    found = predict_tensor_parallel(STEP, 4, LINKS)
    joints = 20 * all_reduce_seconds("auto", 4, 1_000_000, LINKS)
    assert found.joint_s == pytest.approx(joints)
    assert found.compute_s == pytest.approx(0.02)
    assert found.step_s == pytest.approx(0.02 + 0.001 + 0.002 + joints)
    assert found.speedup == pytest.approx(0.086 / found.step_s)
    assert found.steps_per_second == pytest.approx(1 / found.step_s)


def test_one_gpu_has_no_joints():
    found = predict_tensor_parallel(StepProfile("net", 1, 8, 0.03, 0.05, 0.004, 0, 0, ()), 1, LINKS)
    assert (found.joint_s, found.speedup) == (0, 1)
    with pytest.raises(ValueError, match="--joints and --joint-nbytes"):
        predict_tensor_parallel(StepProfile("net", 1, 8, 0.03, 0.05, 0.004, 0, 0, ()), 2, LINKS)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.out(self.down(self.up(x)))


def test_a_recorded_step_knows_its_joints():
    tp = mgpu_core.TensorParallel(Block(), ["cpu"] * 2, {"up": "column", "down": "row", "out": "column_gathered"})
    x = torch.ones(5, 4)
    with mgpu_core.explain() as trace:
        tp(x).sum().backward()
    step = trace.step()
    assert step.name == "tensor_parallel"
    assert step.devices == ("cpu", "cpu")
    assert sorted(span.rank for span in step.spans if span.step == "forward") == [0, 1]
    profile = trace.profile()
    assert (profile.joints, profile.joint_nbytes) == (2, 5 * 4 * 4 + 5 * 8 * 4 // 2)
    assert (profile.ranks, profile.rows) == (1, 1)
    assert StepProfile.from_json(profile.to_json()) == profile
    operations = [call.operation for call in step.collectives]
    assert operations.count("all_reduce") == 2  # of the row, forward and backward
    titles = [scene["title"] for scene in scenes_of(step) if "all_reduce" in scene["title"]]
    assert titles == [
        "all_reduce (direct): the outputs of down are all-reduced",
        "all_reduce (direct): tensors are all-reduced",
    ]


def test_the_command(tmp_path, capsys):
    path, out = tmp_path / "step.json", tmp_path / "out.json"
    path.write_text(STEP.to_json())
    words = ["simulate", "--tensor-parallel", "--topology", "nvlink4", "--gpus", "2,4"]
    assert main([*words, "--json", str(out), str(path)]) == 0
    told = capsys.readouterr().out
    assert "net, 10 joints; nvlink4; tensor parallel" in told
    assert [each["gpus"] for each in json.loads(out.read_text())["predictions"]] == [2, 4]
    assert main([*words, "--joints", "34", "--joint-nbytes", "1000000"]) == 0
    assert "34 joints" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-parallel", "--pipeline"], "cut a net in two ways"),
        (["--tensor-parallel"], "--joints and --joint-nbytes"),
        (["--tensor-parallel", "--scaling", "weak"], "--scaling means nothing with --tensor-parallel"),
        (["--tensor-parallel", "--chunks", "4"], "--chunks means nothing without --pipeline"),
        (["--joints", "4"], "--joints means nothing without --tensor-parallel"),
        (["--tensor-parallel", "--topology", "host"], "parts on CPU ranks share the cores"),
    ],
)
def test_mistakes_are_one_line_and_status_2(words, message, capsys):
    assert main(["simulate", *words]) == 2
    assert message in capsys.readouterr().err
