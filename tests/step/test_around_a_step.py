"""``grad_norm`` and ``updated``: next to a plain loop, with windows, skipped updates, failures and replays."""

import copy
import warnings

import pytest
import torch
from fakes.graphs import give_graphs, without_gpu
from fakes.nets import cpu
from step.nets import mse
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mgpu_core import TrainStep, optim


def net_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batches(count, rows=6):
    torch.manual_seed(1)
    return [[torch.randn(rows, width, dtype=torch.float64) for width in (4, 2)] for _ in range(count)]


def weighted(output, target):
    weights = 1 + target[:, 0].abs()
    return ((output - target) ** 2).mean(1) @ weights, weights.sum()


def alone(output, target):
    total, weight = weighted(output, target)
    return total / weight


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
@pytest.mark.parametrize("home", [optim, torch.optim], ids=["ours", "torch's"])
def test_the_norm_before_clipping_is_one_devices(ranks, home, reduction, clip_norm):
    net = net_of()
    twin = copy.deepcopy(net)
    loss_fn = mse if reduction == "mean" else weighted
    step = TrainStep(
        net, loss_fn, home.SGD(net.parameters(), lr=0.1), cpu(ranks), reduction=reduction, clip_norm=clip_norm
    )
    assert step.grad_norm is None
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    norms, wanted = [], []
    for x, y in batches(4):
        step(x, y)
        norms.append(step.grad_norm)
        optimizer.zero_grad()
        (mse if reduction == "mean" else alone)(twin(x), y).backward()
        wanted.append(clip_grad_norm_(twin.parameters(), clip_norm or float("inf")))
        optimizer.step()
    torch.testing.assert_close(torch.stack(norms), torch.stack(wanted), rtol=1e-12, atol=0)
    assert len(set(map(float, norms))) == 4  # none is where the next one is written


def test_updated_says_which_calls_were_updates(ranks):
    net = net_of()
    step = TrainStep(net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(ranks), accumulate=2)
    assert not step.updated
    told, before = [], None
    for x, y in batches(5):
        step(x, y)
        told.append(step.updated)
        if step.updated:
            before = step.grad_norm
    assert told == [False, True, False, True, False]
    assert step.flush()
    assert step.updated
    assert step.grad_norm != before
    assert not step.flush()
    with pytest.raises(RuntimeError, match="dtype"):
        step(torch.ones(6, 3), torch.ones(6, 2))
    assert not step.updated
    assert step.grad_norm is None


def test_a_norm_that_was_never_asked_for_is_gone_with_its_gradients(ranks):
    net = net_of()
    step = TrainStep(net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(ranks), accumulate=2, error_if_nonfinite=False)
    calls = batches(8)
    for x, y in calls[:5]:
        step(x, y)
    with pytest.raises(RuntimeError, match="read grad_norm before zero_grad"):
        _ = step.grad_norm
    for x, y in calls[5:7]:
        step(x, y)
    assert step.grad_norm > 0  # of the update in between
    step(*calls[7])


def test_one_rank_whose_gradients_were_dropped():
    net = net_of()
    step = TrainStep(net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(1), error_if_nonfinite=False)
    calls = batches(3)
    step(*calls[0])
    step(*calls[1])
    step.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="read grad_norm before zero_grad"):
        _ = step.grad_norm
    step(*calls[2])
    norm = step.grad_norm
    step.optimizer.zero_grad()
    assert step.grad_norm == norm


@pytest.mark.parametrize(
    "change",
    [
        lambda net: clip_grad_norm_(net.parameters(), 1e-3),
        lambda net: net.zero_grad(set_to_none=False),
        lambda net: net(torch.ones(1, 4).double()).sum().backward(),
    ],
)
@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("home", [optim, torch.optim], ids=["ours", "torch's"])
def test_gradients_that_were_changed_are_not_those_of_the_update(home, updates, change, ranks):
    net = net_of()
    step = TrainStep(net, mse, home.SGD(net.parameters(), lr=0.1), cpu(ranks), error_if_nonfinite=False)
    twin = net_of()
    for x, y in batches(updates):
        step(x, y)
        twin.zero_grad()
        mse(twin(x), y).backward()
        wanted = clip_grad_norm_(twin.parameters(), float("inf"))
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    change(net)
    if home is torch.optim and updates == 1:  # which is looked at, and its norm kept
        assert float(step.grad_norm) == pytest.approx(float(wanted), rel=1e-6)
        return
    with pytest.raises(RuntimeError, match="gone or were changed"):
        _ = step.grad_norm


def test_an_optimizer_that_writes_its_gradients(ranks):
    """As torch's SGD does on a GPU, where ``foreach`` is the default."""
    net, twin = net_of(), net_of()
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}
    optimizer = torch.optim.SGD(twin.parameters(), **options)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), **options), cpu(ranks), error_if_nonfinite=False)
    for x, y in batches(4):
        step(x, y)
        twin.zero_grad()
        mse(twin(x), y).backward()
        wanted = clip_grad_norm_(twin.parameters(), float("inf"))
        optimizer.step()
    assert float(step.grad_norm) == pytest.approx(float(wanted), rel=1e-6)


def test_an_update_that_overflows_is_none(ranks):
    net = net_of().float()
    step = TrainStep(
        net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(ranks), amp_dtype=torch.float16, error_if_nonfinite=False
    )
    x, y = torch.ones(6, 4), torch.ones(6, 2)
    step(x, y)
    assert step.updated
    assert step.grad_norm < 100  # of the loss, without its scale
    step(x, y * float("inf"))
    assert not step.updated
    assert step.grad_norm is None


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_replays_have_the_norms_of_steps(monkeypatch, clip_norm):
    give_graphs(monkeypatch, torch.device(cpu(1)[0]).type)
    nets = [net_of()]
    nets.append(copy.deepcopy(nets[0]))
    steps = [
        TrainStep(
            net, weighted, optim.SGD(net.parameters(), lr=0.1), cpu(2),
            reduction="weighted", clip_norm=clip_norm, capture=net is nets[0], error_if_nonfinite=False,
        )
        for net in nets
    ]  # fmt: skip
    without_gpu(steps[0])
    for i, (x, y) in enumerate(batches(9)):
        for step in steps:
            step(x, y)
        assert [step.updated for step in steps] == [True, True]
        if i != 6:
            assert torch.equal(steps[0].grad_norm, steps[1].grad_norm)
    assert steps[0].graphs.replays == 5


def test_parameters_in_shards_have_the_norm(ranks):
    nets = [net_of()]
    nets.append(copy.deepcopy(nets[0]))
    steps = [
        TrainStep(net, mse, optim.AdamW(net.parameters()), cpu(ranks), shard="parameters" if net is nets[0] else None)
        for net in nets
    ]
    for x, y in batches(3):
        for step in steps:
            step(x, y)
        torch.testing.assert_close(steps[0].grad_norm, steps[1].grad_norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("home", [optim, torch.optim], ids=["ours", "torch's"])
def test_gradients_that_are_changed_after_the_update(ranks, home):
    """Clipping there comes too late, and is told once; dropping them, in place too, does no harm."""
    net = net_of()
    step = TrainStep(net, mse, home.SGD(net.parameters(), lr=0.1), cpu(ranks))
    calls = batches(4)
    with warnings.catch_warnings(record=True, action="always") as told:
        for i, (x, y) in enumerate(calls):
            step(x, y)
            if i == 0:
                step.optimizer.zero_grad(set_to_none=False)
            else:
                clip_grad_norm_(net.parameters(), 1e-3)
    texts = [each for each in told if "clip by its argument clip_norm" in str(each.message)]
    assert len(texts) == 1
    assert texts[0].filename == __file__


@pytest.mark.parametrize("clips", [False, True])
def test_other_gradients_on_top_do_no_harm(ranks, clips):
    """As of a generator's loss, which goes through the discriminator."""
    net = net_of()
    step = TrainStep(net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(ranks))
    with warnings.catch_warnings(action="error"):
        for x, y in batches(4):
            step(x, y)
            net(x).mean().backward()
            if clips:
                clip_grad_norm_(net.parameters(), float("inf"))
