"""Steps as graphs, on a device with streams of its own.

The recorder has no GPU, and holds each graph to the work of one device that nobody waits for.
"""

import copy
import threading
import warnings
from itertools import cycle

import pytest
import torch
from fakes.graphs import OPTIMIZERS, OneWeight, give_graphs, total, without_gpu
from fakes.tensors import numbers
from step.adversaries import Adversaries
from step.nets import Branches, Linear, batches, mse
from torch import nn
from torch.optim.lr_scheduler import StepLR

from mgpu_core import TrainStep, convert_sync_batchnorm
from mgpu_core.step.graph_cache import WARM_UP

TEAMS = [
    ["fake:0"] * 2,
    ["fake:2"] * 3,
    ["fake:0"] * 8,
    ["fake:1", "fake:0"],
    ["fake:0", "fake:1", "fake:0", "fake:2"],
    ["fake:0", "fake:1", "fake:2", "fake:3"],
]


@pytest.fixture(autouse=True)
def the_fakes_have_graphs(monkeypatch):
    give_graphs(monkeypatch, torch.device("fake:0").type)


def pair(devices, make, net=None, loss_fn=mse, **settings):
    """Two steps over equal nets: one records, one does not."""
    net = (Branches().double() if net is None else net).to(devices[0])
    twin = copy.deepcopy(net)
    settings = {"error_if_nonfinite": False, "workers": "threads"} | settings
    captured = without_gpu(TrainStep(net, loss_fn, make(net.parameters()), devices, capture=True, **settings))
    return captured, TrainStep(twin, loss_fn, make(twin.parameters()), devices, **settings)


@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("devices", TEAMS[:2])
def test_two_steps_share_a_net(devices, freezes):
    """The first update of one moves what the graphs of the other have read, and they are recorded anew."""
    both = Adversaries(devices, freezes, error_if_nonfinite=False, capture=True)
    without_gpu(both.making)
    without_gpu(both.judging)
    assert all(both.round(seed) for seed in range(WARM_UP + 4))
    replays = both.making.graphs.replays
    assert replays > 0
    both.judging.rebuild()
    without_gpu(both.judging)
    assert all(both.round(seed) for seed in range(20, 20 + WARM_UP + 4))
    assert both.making.graphs.replays > replays


def assert_same(captured, plain):
    assert all(map(torch.equal, captured.module.parameters(), plain.module.parameters()))
    assert all(map(torch.equal, captured.module.buffers(), plain.module.buffers()))


def assert_same_states(captured, plain):
    one, other = captured.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    for position, state in other.items():
        assert all(torch.equal(one[position][key], value) for key, value in state.items())


@pytest.mark.parametrize(("devices", "name"), list(zip(TEAMS, cycle(OPTIMIZERS))))
def test_replays_are_steps(name, devices):
    """Rows that change, fewer than ranks, a scheduler, clipping, another way through the net: the same bits."""
    captured, plain = pair(devices, OPTIMIZERS[name], clip_norm=0.5, bucket_nbytes=200)
    schedules = [StepLR(step.optimizer, 7, 0.5) for step in (captured, plain)]
    with warnings.catch_warnings(action="ignore"):
        for i, (x, y) in enumerate(batches(40, [12] * 5 + [7, 1])):
            way = 2 if i < 30 else 0
            assert torch.equal(captured(x, way, y), plain(x, way, y))
            for schedule in schedules:
                schedule.step()
            assert_same(captured, plain)
            for one, other in zip(captured.module.parameters(), plain.module.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None)
                assert one.grad is None or torch.equal(one.grad, other.grad)
    assert captured.steps == plain.steps == 40
    assert captured.graphs.replays >= 20
    assert_same_states(captured, plain)


@pytest.mark.parametrize("devices", TEAMS, ids=len)
def test_ranks_are_recorded_in_the_threads_that_know_their_device(devices):
    """A thread's first matrix product on a GPU makes a handle, which a recording cannot."""

    threads = []

    class Seen(Linear):
        def forward(self, x):
            threads.append((str(x.device), threading.current_thread().name))
            return self.last(x)

    captured, _ = pair(devices, OPTIMIZERS["momentum"], Seen())
    for _ in range(WARM_UP + 1):
        captured(numbers(16, 3), numbers(16, 2))
    ordinary = set(threads)
    threads.clear()
    captured(numbers(16, 3), numbers(16, 2))
    assert captured.graphs.replays == 1
    assert set(threads) == ordinary
    assert len(ordinary) == len(devices)


def weighed(output, target):
    return (output * target).sum(), (target != 0).sum()


@pytest.mark.parametrize(("devices", "name"), list(zip(TEAMS, cycle(OPTIMIZERS))))
def test_an_overflow_skips_the_update(name, devices):
    settings = {"reduction": "sum", "amp_dtype": torch.float16}
    captured, plain = pair(devices, OPTIMIZERS[name], OneWeight(), total, **settings)
    x, y = torch.ones(2 * len(devices), 1), torch.full((2 * len(devices), 1), 0.125)
    over = y.clone()
    over[-1] = 5.0  # times 65536, and times 32768: more than float16 holds
    for i in range(24):
        target = over if i in (8, 16) else y
        before = captured.graphs.replays
        assert torch.equal(captured(x * (i % 3), target), plain(x * (i % 3), target))
        assert_same(captured, plain)
        assert captured.loss_scale.state_dict() == plain.loss_scale.state_dict()
        assert i not in (8, 16) or captured.graphs.replays == before + 1
    assert captured.loss_scale.skipped == 2
    assert captured.steps == plain.steps == 22
    assert_same_states(captured, plain)


@pytest.mark.parametrize("devices", TEAMS, ids=len)
def test_weights_are_those_of_each_batch(devices):
    captured, plain = pair(devices, OPTIMIZERS["momentum"], OneWeight(), weighed, reduction="weighted", clip_norm=0.5)
    for i in range(12):
        x, y = numbers(16, 1), torch.arange(16.0).sub(i).clamp(min=0)[:, None]
        assert torch.equal(captured(x, y), plain(x, y))
        assert_same(captured, plain)
    assert captured.graphs.replays == 8


def test_shares_that_change_between_replays():
    captured, plain = pair(TEAMS[0], next(iter(OPTIMIZERS.values())), net=Linear())
    for i in range(14):
        if i == 8:
            captured.shares = plain.shares = [3, 1]
        x, y = numbers(8, 3), numbers(8, 2)
        assert torch.equal(captured(x, y), plain(x, y))
        assert [each.rows for each in captured.plan()] == ([6, 2] if i >= 8 else [4, 4])
    assert captured.graphs.replays > 5
    assert_same(captured, plain)


@pytest.mark.parametrize("devices", TEAMS)
def test_class_weights_that_change_between_replays(devices):
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), reduction="sum").to(devices[0])
    make = next(iter(OPTIMIZERS.values()))
    captured, plain = pair(devices, make, net=Linear(), loss_fn=criterion, reduction="sum")
    x, y = numbers(8, 3), (torch.arange(8) % 2).to(devices[0])
    for i in range(14):
        if i == 8:
            criterion.weight.copy_(torch.tensor([3.0, 0.5]))
        assert torch.equal(captured(x, y), plain(x, y)), i
    assert captured.graphs.replays > 5
    assert_same(captured, plain)


@pytest.mark.parametrize(
    ("devices", "settings", "reason"),
    [
        (["fake:0", "cpu"], {}, "there are no CUDA graphs on cpu"),
        (["fake:0", "fake:0"], {"error_if_nonfinite": True}, "error_if_nonfinite=True waits for the gradients"),
    ],
)
def test_why_not(devices, settings, reason):
    step, _ = pair(devices, OPTIMIZERS["momentum"], **settings)
    step(numbers(6, 4).double(), 2, numbers(6, 2).double())
    with pytest.warns(UserWarning, match=f"not captured: {reason}"):
        step(numbers(6, 4).double(), 2, numbers(6, 2).double())
    assert step.graphs.replays == 0


def test_ranks_that_share_a_device_and_meet_take_no_turns():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().to("fake:0")
    alone = copy.deepcopy(net)
    step, _ = pair(["fake:0", "fake:1", "fake:0"], OPTIMIZERS["momentum"], convert_sync_batchnorm(net))
    optimizer = OPTIMIZERS["momentum"](alone.parameters())
    for _ in range(3):
        x, y = (torch.randn(7, columns, dtype=torch.float64, device="fake:0") for columns in (4, 3))
        with warnings.catch_warnings(record=True):
            loss = step(x, y)
        optimizer.zero_grad()
        expected = mse(alone(x), y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    for mine, theirs in zip(step.module.state_dict().values(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)
