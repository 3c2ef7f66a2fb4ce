"""Old habits with optimizers: rates in tensors, steps of the user's own, edits of groups and state, hooks."""

import copy
import warnings

import pytest
import torch
from fakes.nets import cpu
from fakes.traces import is_fused, traced
from step.nets import Branches, Linear, Pair, batches, mse
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook

from mgpu_core import TrainStep, optim


@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=0.01), lambda p: SGD(p, lr=0.05, momentum=0.9)])
def test_a_step_of_the_users_own_between_two(make, ranks):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), make, ranks)
    for i, (x, y) in enumerate(batches(8, 9)):
        if i == 4:  # by hand, and with a layer that the steps had not used before
            for net, optimizer in ((pair.net, pair.optimizer), (pair.alone, pair.reference)):
                optimizer.zero_grad()
                mse(net(x, 2), y).backward()
                optimizer.step()
        else:
            pair.both(x, 0 if i < 4 else 2, y)
    assert pair.far() < 1e-9


@pytest.mark.parametrize("which", ["own", "all"])
def test_step_hooks_registered_later_are_called(which):
    net = Linear()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    step = TrainStep(net, mse, optimizer, cpu(2))
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    step(x, y)
    calls = []
    register = optimizer.register_step_post_hook
    if which == "all":
        register = register_optimizer_step_post_hook
    handle = register(lambda *_: calls.append(1))
    try:
        step(x, y)
    finally:
        handle.remove()
    assert is_fused(traced(lambda: step(x, y)), "sgd")
    assert calls == [1]


def test_optimizers_and_modes_that_no_step_can_have():
    net = Linear()
    with pytest.raises(TypeError, match="LBFGS"):
        TrainStep(net, mse, torch.optim.LBFGS(net.parameters()), cpu(2))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    with torch.no_grad():
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert step.steps == 1


def test_a_state_of_another_optimizer_changes_nothing():
    net, other = Linear(), Linear()
    step = TrainStep(net, mse, AdamW(net.parameters()), cpu(2))
    theirs = TrainStep(other, mse, SGD(other.parameters(), lr=0.5), cpu(2))
    for each in (step, theirs):
        each(torch.ones(4, 3), torch.zeros(4, 2))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="another optimizer than AdamW"):
        step.load_state_dict(theirs.state_dict())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    step(torch.ones(4, 3), torch.zeros(4, 2))


def test_a_state_loaded_in_a_window_stays_when_the_next_call_fails():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), accumulate=2)
    state = step.state_dict()
    state["module"]["0.running_mean"].fill_(7)
    step(torch.randn(4, 3), torch.zeros(4, 2))
    step.load_state_dict(state)
    with pytest.raises(ValueError, match="differ in their number of rows"):
        step(torch.randn(4, 3), torch.zeros(5, 2))
    assert net[0].running_mean.tolist() == [7, 7, 7]


@pytest.mark.parametrize("make", [SGD, optim.SGD])
def test_a_left_over_step_of_the_optimizer_is_told_of(make, ranks):
    net = Linear()
    optimizer = make(net.parameters(), lr=0.1)
    step = TrainStep(net, mse, optimizer, cpu(ranks))
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            step(x, y)
            optimizer.zero_grad()
            mse(net(x), y).backward()  # a step of the user's own
            optimizer.step()
            step(x, y)
    with pytest.warns(UserWarning, match=r"optimizer\.step\(\) after a TrainStep's call updates a second time") as told:
        optimizer.step()
    assert [each.filename for each in told] == [__file__]
    step.close()
    with warnings.catch_warnings(action="error"):
        optimizer.step()


@pytest.mark.parametrize("make", [SGD, optim.SGD])
def test_a_step_by_a_part_of_the_gradients_is_told_of_and_one_by_none_is_not(make):
    net = nn.Sequential(Linear(), nn.Linear(2, 2))
    optimizer = make(net[0].parameters(), lr=0.1)
    step = TrainStep(net, mse, optimizer, cpu(1))
    step(torch.ones(4, 3), torch.ones(4, 2))
    first, *others = (each.grad for each in net[0].parameters())
    assert others[0] is not None
    next(net[0].parameters()).grad = first.clone()
    with pytest.warns(UserWarning, match="updates a second time"):
        optimizer.step()
    optimizer.zero_grad()  # those of the second layer, which is not the optimizer's, stay
    mse(net(torch.ones(4, 3)), torch.ones(4, 2)).backward()
    with warnings.catch_warnings(action="error"):
        optimizer.step()
