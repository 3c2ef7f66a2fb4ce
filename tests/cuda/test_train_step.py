"""TrainStep on a GPU: one device's numbers, by itself, over several ranks on it, and as replays of a graph."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from mgpu_core import TrainStep
from mgpu_core.optim import SGD, AdamW

TEAMS = [[0], [0, 0], [0, 0, 0, 0]]
OPTIMIZERS = {
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
}


def mlp(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 3))


def data(steps, rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    for i in range(steps):
        count = rows[i % len(rows)]
        x = torch.randn(count, 20, generator=generator, dtype=dtype)
        yield x.cuda(), torch.randint(0, 3, (count,), generator=generator).cuda()


def same_parameters(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("team", TEAMS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_devices_numbers_over_100_steps(gpu, name, team, capture):
    net = mlp().double().to(gpu)
    alone = copy.deepcopy(net)
    optimizer, reference = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](alone.parameters())
    schedules = StepLR(optimizer, 30, 0.5), StepLR(reference, 30, 0.5)
    step = TrainStep(net, nn.functional.cross_entropy, optimizer, team, capture=capture, clip_norm=0.5)
    for x, y in data(100, [16] * 9 + [11]):
        reference.zero_grad()
        loss = nn.functional.cross_entropy(alone(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        reference.step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-9, atol=1e-9)
        for schedule in schedules:
            schedule.step()
    same_parameters(net, alone)
    step.check_replicas()
    if capture:
        assert step.graphs.replays > 80


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
@pytest.mark.parametrize("team", [[0, 1], [1, 0, 1]], ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "direct", "nccl"])
def test_graphs_of_several_gpus_are_their_eager_steps(gpu, team, algorithm):
    nets = [mlp().to(f"cuda:{team[0]}") for _ in range(2)]
    steps = [
        TrainStep(
            net, nn.functional.cross_entropy, AdamW(net.parameters(), lr=0.01), team,
            capture=capture, algorithm=algorithm, bucket_nbytes=2000, clip_norm=0.5,
        )
        for net, capture in zip(nets, (True, False), strict=True)
    ]  # fmt: skip
    for x, y in data(60, [16] * 9 + [11], torch.float32):
        assert torch.equal(*[step(x, y) for step in steps])
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    assert steps[0].graphs.replays > 40, steps[0].graphs.reason
    steps[0].check_replicas()


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_replays_draw_as_ordinary_steps_do(gpu, team):
    """Dropout and running statistics: the generator goes on from replay to replay, and from its seed."""
    losses = []
    for capture in (False, True, True):
        net = nn.Sequential(mlp(dropout=0.5), nn.BatchNorm1d(3)).double().to(gpu)
        step = TrainStep(net, nn.functional.cross_entropy, SGD(net.parameters(), lr=0.01), team, capture=capture)
        torch.manual_seed(5)
        losses.append([float(step(x, y)) for x, y in data(20, [16])])
    assert losses[1] == losses[2]
    assert len(set(losses[1][5:])) == 15  # not the same numbers again and again
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-9)


def test_mixed_precision_captured(gpu):
    losses = []
    for capture in (False, True):
        net = mlp().to(gpu)
        step = TrainStep(
            net, nn.functional.cross_entropy, SGD(net.parameters(), lr=0.1), [0], amp_dtype=torch.bfloat16,
            capture=capture,
        )  # fmt: skip
        losses.append([float(step(x, y)) for x, y in data(12, [16], torch.float32)])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("team", TEAMS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_in_a_replay_skips_its_update(gpu, name, team):
    """100 steps in float16 with a scheduler and clipping; some targets overflow, at a scale that begins too large."""
    found = []
    for capture in (False, True):
        net = mlp().to(gpu)
        optimizer = OPTIMIZERS[name](net.parameters())
        schedule = StepLR(optimizer, 30, 0.5)

        def weighed(output, target):
            weight = torch.where(target[:, 1:] > 0, 1e5, 1.0)
            return (nn.functional.cross_entropy(output, target[:, 0], reduction="none")[:, None] * weight).mean()

        step = TrainStep(net, weighed, optimizer, team, amp_dtype=torch.float16, clip_norm=0.5, capture=capture)
        losses = []
        for i, (x, y) in enumerate(data(100, [16], torch.float32)):
            target = torch.stack([y, torch.full_like(y, int(i in (40, 70)))], dim=1)
            losses.append(float(step(x, target)))
            schedule.step()
        counts = float(optimizer.state[net[0].weight].get("step", 0))
        found.append((losses, step.loss_scale.state_dict(), step.steps, counts))
        if capture:
            assert step.graphs.replays > 70
    assert found[0][1:] == found[1][1:]
    assert found[1][1]["skipped"] >= 2
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-2, atol=1e-2)


def test_what_cannot_be_captured_says_why(gpu):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x) if float(x.sum()) < 1e9 else x

    net = Looks().to(gpu)
    step = TrainStep(net, nn.functional.cross_entropy, SGD(net.parameters(), lr=0.1), [0], capture=True)
    with warnings.catch_warnings(record=True, action="always") as told:
        losses = [float(step(x, y)) for x, y in data(8, [16], torch.float32)]
    assert len(losses) == step.steps == 8
    assert [text for text in map(str, (each.message for each in told)) if "recording it failed" in text]
    assert step.graphs.replays == 0


def test_a_capture_that_fails_leaves_torch_whole(gpu):
    """Random numbers, memory and captures of other steps are as before it."""

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.looks = mlp(dropout=0.5), True

        def forward(self, x):
            found = self.net(x)
            return found if not self.looks or float(x.sum()) < 1e9 else x

    def stepping(looks):
        net = Draws().to(gpu)
        net.looks = looks
        step = TrainStep(net, nn.functional.cross_entropy, SGD(net.parameters(), lr=0.1), [0], capture=True)
        with warnings.catch_warnings(action="ignore"):
            assert all(bool(step(x, y).isfinite()) for x, y in data(8, [16], torch.float32))
        return step.graphs.replays

    assert stepping(looks=True) == 0
    assert nn.functional.dropout(torch.ones(1000, device=gpu), 0.5).eq(0).any()
    assert stepping(looks=False) > 0
    torch.cuda.synchronize()
