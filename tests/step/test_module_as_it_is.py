"""The step runs the module as it is at each call; what a forward assigns stays on rank 0."""

import copy
import warnings
from argparse import Namespace
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from fakes.nets import cpu
from step.nets import RANKS, Pair, batches, here, mse, two_layers
from torch import nn
from torch.optim import SGD

from mgpu_core import TrainStep
from mgpu_core.step import parts


class Child(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(x) * self.config.scale


class Scaled(nn.Module):
    """All that it is multiplied by is found in attributes of all kinds."""

    def __init__(self):
        super().__init__()
        self.config = Namespace(scale=1.0, inner=SimpleNamespace(scale=1.0))
        self.child = Child(self.config)
        self.scale = 1.0
        self.listed, self.named = [1.0], {"a": {"b": [1.0]}}
        self.tensor = here(torch.ones((), dtype=torch.float64))
        self.function, self.mode = torch.nn.functional.softplus, "as it is"
        self.method = self.scaled
        self.optional = 1.0
        self.double()

    def scaled(self, x):
        return self.scale * x

    def forward(self, x):
        x = self.method(self.child(x)) * self.config.inner.scale * self.listed[0] * self.named["a"]["b"][0]
        return self.function(x) * self.tensor * (1 if self.mode == "as it is" else 3) * getattr(self, "optional", 2)


CHANGES = {
    "number": lambda net: setattr(net, "scale", 2.0),
    "word": lambda net: setattr(net, "mode", "another"),
    "list": lambda net: setattr(net, "listed", [2.0]),
    "entry": lambda net: net.listed.__setitem__(0, 2.0),
    "deep entry": lambda net: net.named["a"]["b"].__setitem__(0, 2.0),
    "shared object": lambda net: setattr(net.config, "scale", 2.0),
    "object in an object": lambda net: setattr(net.config.inner, "scale", 2.0),
    "tensor": lambda net: setattr(net, "tensor", here(torch.full((), 2.0, dtype=torch.float64))),
    "written tensor": lambda net: net.tensor.fill_(2.0),
    "function": lambda net: setattr(net, "function", torch.tanh),
    "method": lambda net: setattr(net, "method", MethodType(tripled, net)),
    "forward": lambda net: setattr(net, "forward", MethodType(tripled_forward, net)),
    "gone": lambda net: delattr(net, "optional"),
    "in a child": lambda net: setattr(net.child, "config", Namespace(scale=5.0)),
}


def tripled(self, x):
    return 3 * x.tanh() + self.scale


def tripled_forward(self, x):
    return 3 * self.child(x) * self.scale


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CHANGES)
def test_attributes_that_the_user_changes(name, ranks):
    torch.manual_seed(0)
    pair = Pair(Scaled(), partial(SGD, lr=0.05, momentum=0.9), ranks)
    for i, (x, y) in enumerate(batches(6, 9)):
        if i in (0, 3):  # also before the first step
            for net in (pair.net, pair.alone) if i else ():
                CHANGES[name](net)
        ours, theirs = pair.both(x, y)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    assert pair.far() < 1e-12


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_changed_before_the_first_step_count_in_an_evaluation(name):
    torch.manual_seed(0)
    pair = Pair(Scaled(), partial(SGD, lr=0.05), 2)
    for net in (pair.net, pair.alone):
        CHANGES[name](net)
    (x, y), *_ = batches(1, 9)
    assert torch.allclose(pair.step.evaluate(x, y), mse(pair.alone(x), y), rtol=0, atol=1e-12)


class Wrapped(nn.Module):
    """The same parameters, and other numbers."""

    def __init__(self, inner):
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) * 3


sgd = partial(SGD, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.__setitem__(1, nn.Tanh()),
        lambda net: net.append(nn.Tanh()),
        lambda net: net.__delitem__(1),
        lambda net: net.__setitem__(0, Wrapped(net[0])),
    ],
    ids=["another", "one more", "one less", "wrapped"],
)
def test_modules_that_the_user_replaces(change, ranks):
    pair = Pair(two_layers(), sgd, ranks)
    for i, (x, y) in enumerate(batches(4, 9)):
        if i == 2:
            change(pair.net)
            change(pair.alone)
        pair.both(x, y)
    assert pair.far() < 1e-12


@pytest.mark.parametrize("ranks", RANKS)
def test_layers_with_new_parameters(ranks):
    pair = Pair(two_layers(), sgd, ranks)
    for i, (x, y) in enumerate(batches(6, 9)):
        if i == 3:
            gone = pair.net[0].weight
            torch.manual_seed(1)
            fresh = nn.Linear(4, 2).double()
            for net, optimizer in ((pair.net, pair.optimizer), (pair.alone, pair.reference)):
                net[0] = nn.Linear(4, 2).double()
                net[0].load_state_dict(fresh.state_dict())
                del optimizer.param_groups[0]
                optimizer.add_param_group({"params": list(net[0].parameters())})
            left = gone.detach().clone()
        pair.both(x, y)
    assert pair.far() < 1e-12
    assert torch.equal(gone, left)
    assert pair.step.steps == 6


def test_new_parameters_are_refused_while_gradients_accumulate():
    pair = Pair(two_layers(), sgd, 2, accumulate=2)
    (x, y), *_ = batches(1, 9)
    pair.step(x, y)
    pair.net[0] = nn.Linear(4, 2).double()
    with pytest.raises(RuntimeError, match=r"while gradients were accumulated: call step\.flush\(\)"):
        pair.step(x, y)


@pytest.mark.parametrize("ranks", RANKS)
def test_another_module_in_a_loss(ranks):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weights", torch.ones(2).double())
            self.inner = nn.MSELoss()

        def forward(self, output, target):
            return self.inner(output * self.weights, target)

    net, loss = two_layers(), Loss()
    step = TrainStep(net, loss, SGD(net.parameters(), lr=0.0), cpu(ranks))
    (x, y), *_ = batches(1, 9)
    step(x, y)
    loss.inner = nn.L1Loss()
    loss.weights.fill_(3)
    assert torch.allclose(step(x, y), loss(net(x), y), rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("ranks", RANKS)
def test_a_forward_may_make_modules_without_parameters(ranks):
    pair = Pair(MakesItsOwn(), sgd, ranks)
    for x, y in batches(4, 9):
        pair.both(x, y)
    assert pair.far() < 1e-12
    assert pair.net.calls == 4


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("begin", [0, 2])
def test_hooks_of_parameters_come_and_go(begin, ranks):
    """Each rank's own gradient is seen; also where the first hook comes after the first step."""
    pair = Pair(two_layers(), sgd, ranks)
    seen, handles = [], []
    for i, (x, y) in enumerate(batches(5, 16)):
        if i == begin:
            handles = [each[0].weight.register_hook(lambda gradient: gradient * 2) for each in (pair.net, pair.alone)]
            handles.append(pair.net[0].weight.register_hook(seen.append))
        if i == begin + 2:
            for each in handles:
                each.remove()
        seen.clear()
        pair.both(x, y)
        assert len(seen) == (ranks if begin <= i < begin + 2 else 0)
    assert pair.far() < 1e-12


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_of_modules_come_and_go(kind, ranks):
    pair = Pair(two_layers(), sgd, ranks)
    calls, rows = [], []
    for i, (x, y) in enumerate(batches(4, 16)):
        if i == 1:
            handle = getattr(pair.net[0], f"register_{kind}")(lambda *_: calls.append(None))
        if i == 3:
            handle.remove()
        calls.clear()
        pair.both(x, y)
        rows.append(len(calls))
    assert rows == [0, ranks, ranks, 0]
    assert pair.far() < 1e-12


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


@pytest.mark.parametrize("ranks", RANKS)
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


@pytest.mark.parametrize("ranks", RANKS)
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


@pytest.mark.parametrize("part", ["RankModules", "Reducer", "OptimizerStep", "ForwardBackward", "Update"])
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
        patch.setattr(parts, part, fails)
        with pytest.raises(KeyboardInterrupt):
            pair.step(x, y)
    for _ in range(2):
        mine, alone = pair.both(x, y)
        assert torch.allclose(mine, alone)
    assert pair.far() < 1e-12
