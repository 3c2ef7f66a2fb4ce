"""The optimizer's state in shards: the same bits as without, an N-th of the memory, whole wherever somebody looks."""

import copy
from functools import partial

import pytest
import torch
from fakes.tensors import numbers
from step.nets import Branches, Linear, batches, mse
from torch import nn

from mgpu_core import TrainStep, _core
from mgpu_core.optim import SGD, Adam, AdamW, Lion

TEAMS = [
    ["fake:0", "fake:1"],
    ["fake:0", "fake:1", "fake:0"],
    ["fake:2", "fake:0", "fake:1"],
    ["fake:0", "fake:1", "fake:2", "fake:3"],
]
OPTIMIZERS = {
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1),
}


class Strided(nn.Module):
    """A weight that is not contiguous, in buckets that cut through parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = Branches()
        self.turned = nn.Parameter(torch.randn(40, 4).t())

    def forward(self, x, way):
        return self.body(x @ self.turned @ self.turned.t() / 40, way)


def pair(devices, make, **settings):
    nets = [Strided().double().to(devices[0]) for _ in range(2)]
    return [
        TrainStep(net, mse, make(net.parameters()), devices, shard=shard, bucket_nbytes=2000, **settings)
        for net, shard in zip(nets, ("optimizer", None), strict=True)
    ]


def train(steps, count, seed=0, same=torch.equal):
    for i, (x, y) in enumerate(batches(count, 11, seed=seed)):
        losses = [step(x, i % 3, y) for step in steps]
        assert same(*losses)


def assert_same_values(steps, same=torch.equal):
    for one, other in zip(*(step.module.parameters() for step in steps), strict=True):
        assert same(one.detach(), other.detach())
    for step in steps:
        step.check_replicas()


def assert_same_states(steps):
    states = [step.optimizer.state_dict()["state"] for step in steps]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        assert state.keys() == states[1][index].keys()
        for name, value in state.items():
            other = states[1][index][name]
            assert value.shape == other.shape
            assert torch.equal(value, other), name


@pytest.mark.parametrize("devices", TEAMS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_without(name, devices):
    steps = pair(devices, OPTIMIZERS[name])
    train(steps, 7)
    assert_same_values(steps)
    assert_same_states(steps)
    train(steps, 3)  # a state that was looked at is still the one that is used
    assert_same_values(steps)
    assert all(each.grad is None for each in steps[0].module.parameters())


@pytest.mark.parametrize("settings", [{"clip_norm": 0.01}, {"accumulate": 3}, {"amp_dtype": torch.bfloat16}], ids=str)
def test_settings(settings):
    steps = pair(TEAMS[3], OPTIMIZERS["adamw"], **settings)
    in_another_order = "clip_norm" in settings  # the norm is added up so
    same = partial(torch.allclose, rtol=1e-12, atol=0) if in_another_order else torch.equal
    train(steps, 6, same=same)
    assert_same_values(steps, same)


@pytest.mark.parametrize("devices", TEAMS, ids=str)
def test_each_device_keeps_an_nth_of_the_state(devices):
    net = nn.Linear(64, 64).to(devices[0])
    step = TrainStep(net, mse, AdamW(net.parameters()), devices, shard="optimizer")
    step(numbers(8, 64), numbers(8, 64))
    kept = {
        device.groups.device: sum(each.numel() for flats in device.states.values() for each in flats)
        for device in step._update.optimizer_step.flat.devices
    }
    shards = len(set(devices))
    assert len(kept) == shards
    align = 512 // 4
    most = 2 * -(-(64 * 64 + align) // (align * shards)) * align
    assert all(count == most for count in kept.values())
    assert not any(step.optimizer.state.values())  # nothing is shown


def test_gradients_are_scattered_and_values_gathered():
    net = nn.Linear(64, 64).to("fake:0")
    step = TrainStep(net, mse, AdamW(net.parameters()), TEAMS[1][:2], shard="optimizer")
    step(numbers(8, 64), numbers(8, 64))
    _core.reset_counters()
    step(numbers(8, 64), numbers(8, 64))
    made = {(operation, rank): calls for (operation, _, rank), (calls, _) in _core.counters().items()}
    assert made[("reduce_scatter", 0)] == made[("all_gather", 0)] == made[("reduce_scatter", 1)] == 1
    assert not any(operation == "all_reduce" for operation, _ in made)


def test_a_state_goes_between_shards_of_all_numbers_and_none():
    sharded, plain = pair(TEAMS[1], OPTIMIZERS["amsgrad"])
    train([sharded, plain], 4)
    state = sharded.state_dict()
    steps = [sharded, plain]
    for devices in (TEAMS[3], ["fake:0"]):
        other = pair(devices, OPTIMIZERS["amsgrad"])[0]
        other.load_state_dict(copy.deepcopy(state))
        assert_same_states([other, plain])
        steps.append(other)
    back = pair(TEAMS[0], OPTIMIZERS["amsgrad"])[0]
    back.load_state_dict(plain.state_dict())
    assert_same_states([back, plain])
    for x, y in batches(3, 12, seed=3):
        for step in [*steps, back]:
            step(x, 2, y)
    for step in [*steps, back]:
        for one, other in zip(step.module.parameters(), plain.module.parameters(), strict=True):
            assert torch.allclose(one.detach(), other.detach(), rtol=1e-10)
        step.check_replicas()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_the_user_s_own_in_between(name):
    steps = pair(TEAMS[1], OPTIMIZERS[name])
    train(steps, 3)
    for step in steps:
        for each in step.module.parameters():
            each.grad = torch.ones_like(each)
        step.optimizer.step()
        step.optimizer.zero_grad()
    assert_same_states(steps)
    train(steps, 3)
    assert_same_values(steps)
    assert_same_states(steps)


def test_it_is_left_with_a_whole_state():
    steps = pair(TEAMS[1], OPTIMIZERS["adamw"])
    train(steps, 3)
    for step in steps:
        step.close()
    for one, other in zip(*(step.optimizer.state.values() for step in steps), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    for step in steps:
        for each in step.module.parameters():
            each.grad = torch.ones_like(each)
        step.optimizer.step()
    for one, other in zip(*(step.module.parameters() for step in steps), strict=True):
        assert torch.equal(one.detach(), other.detach())


def test_a_failed_step_leaves_the_state():
    steps = pair(TEAMS[1], OPTIMIZERS["adamw"])
    train(steps, 2)
    for step in steps:
        with pytest.raises(RuntimeError):
            step(torch.ones(4, 9), 2, torch.ones(4, 2))
    assert_same_states(steps)
    train(steps, 2)
    assert_same_values(steps)


def test_an_overflow_is_seen_in_every_shard():
    for row in range(3):
        net = nn.Linear(2, 600, bias=False).to("fake:0")
        step = TrainStep(
            net, lambda output, target: (output.float() * target).sum(), SGD(net.parameters(), lr=1.0),
            ["fake:0", "fake:1", "fake:2"], reduction="sum", amp_dtype=torch.float16, shard="optimizer",
            error_if_nonfinite=False,
        )  # fmt: skip
        before = net.weight.detach().clone()
        target = torch.zeros(3, 600)
        target[:, 250 * row] = 1e30  # a column of each shard
        step(torch.ones(3, 2), target)
        assert step.steps == 0
        assert step.loss_scale.skipped == 1
        assert torch.equal(net.weight.detach(), before)


@pytest.mark.parametrize(
    ("make", "devices", "text"),
    [
        (lambda p: torch.optim.SGD(p), TEAMS[0], r"mgpu_core.optim \(SGD, Adam, AdamW, Lion\), not for torch.optim"),
        (lambda p: SGD(p, lr=1.0), ["fake:0", "cpu"], "devices of one kind"),
    ],
)
def test_what_shards_cannot_have(make, devices, text):
    net = Linear().to("fake:0")
    with pytest.raises(ValueError, match=text):
        TrainStep(net, mse, make(net.parameters()), devices, shard="optimizer")
    assert not any(each._post_accumulate_grad_hooks for each in net.parameters())


def test_hooks_on_the_optimizer_run_once_a_step():
    steps, calls = pair(TEAMS[1], OPTIMIZERS["momentum"]), []
    for step in steps:
        step.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        step.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(steps, 3)
    assert calls == ["before", "after"] * 6
    assert_same_values(steps)


def test_on_one_device_there_is_nothing_to_share():
    net = Linear().to("fake:0")
    step = TrainStep(net, mse, AdamW(net.parameters()), ["fake:0"] * 2, shard="optimizer")
    step(numbers(4, 3), numbers(4, 2))
    assert all("exp_avg" in state for state in step.optimizer.state.values())
    assert net.last.weight.grad is not None


def test_a_state_dict_that_fails_midway_changes_nothing():
    steps = pair(TEAMS[1], OPTIMIZERS["adamw"])
    train(steps, 2)

    def refuse(_):
        raise KeyError("not now")

    handle = steps[0].optimizer.register_state_dict_pre_hook(refuse)
    with pytest.raises(KeyError, match="not now"):
        steps[0].optimizer.state_dict()
    handle.remove()
    train(steps, 2)
    assert_same_values(steps)
    assert_same_states(steps)


@pytest.mark.parametrize("devices", TEAMS)
@pytest.mark.parametrize("shard", ["optimizer", None])
def test_a_batch_without_any_weight_has_a_gradient_of_zero(shard, devices):
    def weighed(output, target):
        counts = (target >= 0).double()
        return ((output - target) ** 2 * counts).sum(), counts.sum()

    net = Branches().double().to(devices[0])
    settings = {"reduction": "weighted", "clip_norm": 1.0, "error_if_nonfinite": False, "shard": shard}
    step = TrainStep(net, weighed, SGD(net.parameters(), lr=0.1), devices, **settings)
    x, y = (numbers(12, columns, device=devices[0]).double() for columns in (4, 2))
    step(x, 2, y.abs())
    before = copy.deepcopy(net.state_dict())
    assert bool(torch.isnan(step(x, 2, y * 0 - 1)))
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    step(x, 2, y.abs())
    assert all(bool(torch.isfinite(each).all()) for each in net.parameters())
    assert not torch.equal(net.last.weight, before["last.weight"])
    step.check_replicas()
