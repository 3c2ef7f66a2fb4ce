"""The step runs the module as it is at each call; what a forward assigns stays on rank 0."""

import copy
import warnings
from functools import partial

import pytest
import torch
from fakes.nets import cpu
from step.nets import Pair, batches, mse, two_layers
from torch import nn
from torch.optim import SGD

from mgpu_core import TrainStep

sgd = partial(SGD, lr=0.05, momentum=0.9)


def test_new_parameters_are_refused_while_gradients_accumulate():
    pair = Pair(two_layers(), sgd, 2, accumulate=2)
    (x, y), *_ = batches(1, 9)
    pair.step(x, y)
    pair.net[0] = nn.Linear(4, 2).double()
    with pytest.raises(RuntimeError, match=r"while gradients were accumulated: call step\.flush\(\)"):
        pair.step(x, y)


class MakesItsOwn(nn.Module):
    """Makes a module in its first forwards."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2).double()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls < 3:
            self.act = nn.Tanh()
        return self.act(self.last(x))


def test_a_forward_may_make_modules_without_parameters(ranks):
    pair = Pair(MakesItsOwn(), sgd, ranks)
    for x, y in batches(4, 9):
        pair.both(x, y)
    assert pair.far() < 1e-12
    assert pair.net.calls == 4


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2).double()
        self.calls = 0
        for name in "abcdef":
            setattr(self, name, 0)

    def forward(self, x):
        self.calls += 1
        for name in "abcdef":
            setattr(self, name, self.calls)
        return self.last(x)


def test_what_a_forward_assigns_stays_on_rank_0(ranks):
    net = Counting()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.05), cpu(ranks))
    with warnings.catch_warnings(record=True, action="always") as told:
        for x, y in batches(5, 9):
            step(x, y)
        net.calls = 100
        step.evaluate(x, y)
    assert net.calls == 101
    assert len(told) == (ranks > 1)
    for each in told:
        assert "the forward of Counting assigns calls, a, b, c, d and 2 more: the module keeps" in str(each.message)
        assert each.filename == __file__


@pytest.mark.parametrize("static", [False, True])
def test_a_static_graph_has_the_module_that_the_first_call_found(static):
    net = two_layers()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.0), cpu(3), static_graph=static)
    (x, y), *_ = batches(1, 12)
    step(x, y)
    net[1].inplace = net[0].flag = True  # an attribute that nobody reads
    net[1] = nn.Tanh()
    as_it_is, first = mse(net(x), y), mse(nn.Sequential(net[0], nn.ReLU())(x), y)
    assert torch.allclose(step(x, y), first if static else as_it_is, rtol=0, atol=1e-12)
    assert not torch.allclose(as_it_is, first)
    step.rebuild()
    assert torch.allclose(step(x, y), as_it_is, rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
def test_modes_buffers_and_frozen_parameters_are_followed(static, ranks):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    pair = Pair(net, sgd, ranks, static_graph=static)
    for i, (x, y) in enumerate(batches(8, 16)):
        for each in (pair.net, pair.alone):
            each.eval()  # statistics of a batch would be those of each rank's rows
            each[0].weight.requires_grad_(i % 3 > 0)
            each[1].running_mean.fill_(i)
        pair.both(x, y)
    assert pair.far() < 1e-12


def test_a_rate_of_dropout_gives_ranks_numbers_of_their_own():
    results = set()
    for _ in range(10):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.0), nn.Linear(64, 2)).double()
        step = TrainStep(net, mse, SGD(net.parameters(), lr=0.05), cpu(4))
        (x, y), *_ = batches(1, 16)
        step(x, y)
        net[1].p = 0.5
        step(x, y)
        results.add(float(step(x, y)))
        step.close()
    assert len(results) == 1


PARTS = (
    "ranks.RankModules",
    "cut_gradients.Reducer",
    "update.OptimizerStep",
    "train_step.passes_of",
    "train_step.Update",
)


@pytest.mark.parametrize("part", PARTS)
def test_a_step_that_could_not_be_built_anew_is_built_by_the_next_call(monkeypatch, part):
    pair = Pair(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double(), partial(SGD, lr=0.1), 2)
    x, y = next(iter(batches(1, 8)))
    pair.both(x, y)
    layer = nn.Linear(3, 2).double()
    for net, optimizer in ((pair.net, pair.optimizer), (pair.alone, pair.reference)):
        net[1] = copy.deepcopy(layer)
        optimizer.param_groups[0]["params"] = list(net.parameters())

    def fails(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"mgpu_core.step.{part}", fails)
        with pytest.raises(KeyboardInterrupt):
            pair.step(x, y)
    for _ in range(2):
        mine, alone = pair.both(x, y)
        assert torch.allclose(mine, alone)
    assert pair.far() < 1e-12
