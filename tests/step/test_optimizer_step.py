"""State of steps and their optimizers: saved, resumed, edited and taken over."""

import copy
import io
import warnings

import pytest
import torch
from fakes.nets import cpu
from fakes.traces import is_fused, traced
from step.nets import Branches, Linear, Pair, batches, mse, plain_step, rows
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook

from mgpu_core import TrainStep, optim


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 2)])
@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=0.01), lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5)])
def test_resumed_on_another_number_of_ranks(before, after, make):
    torch.manual_seed(0)
    net = Branches().double()
    other = copy.deepcopy(net)
    step = TrainStep(net, mse, make(net.parameters()), cpu(before))
    data = list(batches(8, 9))
    for i, (x, y) in enumerate(data[:4]):
        step(x, i % 2, y)
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    file.seek(0)
    resumed = TrainStep(other, mse, make(other.parameters()), cpu(after))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.steps == 4
    for i, (x, y) in enumerate(data[4:]):
        step(x, i % 2, y)
        resumed(x, i % 2, y)
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12 if before != after else 0)


def test_the_optimizers_own_state_works_as_ever():
    torch.manual_seed(0)
    pair = Pair(Branches().double(), lambda p: AdamW(p, lr=0.01), 2)
    data = list(batches(9, 9))
    for i, (x, y) in enumerate(data[:3]):
        pair.both(x, i % 2, y)
    mine, theirs = pair.optimizer.state_dict(), pair.reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        for name, value in state.items():
            assert torch.allclose(mine["state"][index][name], value)
            assert mine["state"][index][name].dtype == value.dtype
    # Into a torch optimizer, and back into ours.
    pair.reference.load_state_dict(copy.deepcopy(mine))
    pair.optimizer.load_state_dict(copy.deepcopy(theirs))
    for i, (x, y) in enumerate(data[3:]):
        pair.both(x, i % 2, y)
    assert pair.far() < 1e-12


def test_the_modules_versions_are_in_the_state():
    _, step = plain_step(2)
    assert step.state_dict()["module"]._metadata[""]["version"] == 1


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("first", ["scheduler", "state"])
def test_a_state_with_what_a_scheduler_has_added(first):
    """In the usual order: a scheduler that goes on needs what the state has, and one that is new adds it itself."""

    def scheduler(optimizer, steps=-1):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5, last_epoch=steps)

    def resumed(state, load):
        net = Linear()
        optimizer = SGD(net.parameters(), lr=0.5, momentum=0.9)
        if first == "scheduler":
            schedule = scheduler(optimizer)
        load(net, optimizer, state)
        if first == "state":
            schedule = scheduler(optimizer, 1)
        schedule.step()
        return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}

    net = Linear()
    optimizer = SGD(net.parameters(), lr=0.5, momentum=0.9)
    step, schedule = TrainStep(net, mse, optimizer, cpu(2)), scheduler(optimizer)
    step(torch.ones(4, 3), torch.zeros(4, 2))
    schedule.step()
    state = step.state_dict()
    found = resumed(state, lambda net, made, state: TrainStep(net, mse, made, cpu(2)).load_state_dict(state))
    assert found == resumed(state, lambda _, made, state: made.load_state_dict(state["optimizer"]))
    del state["optimizer"]["param_groups"][0]["momentum"]
    with pytest.raises(ValueError, match="another optimizer than SGD: its groups have no momentum"):
        step.load_state_dict(state)


def test_tied_weights_are_saved_once(tmp_path):
    net = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    net[1].weight = net[0].weight
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(2))
    torch.save(step.state_dict(), tmp_path / "step.pt")
    assert (tmp_path / "step.pt").stat().st_size < 250_000  # of 160,000 bytes each
    state = torch.load(tmp_path / "step.pt", weights_only=True)
    step.load_state_dict(state)
    assert state["module"]["0.weight"].data_ptr() == state["module"]["1.weight"].data_ptr()


@pytest.mark.parametrize(("name", "value"), [("amsgrad", False), ("amsgrad", True), ("decoupled_weight_decay", True)])
def test_switches_of_the_groups_between_two_steps(name, value, ranks):
    started = {"amsgrad": not value} if name == "amsgrad" else {}
    pair = Pair(Branches().double(), lambda p: Adam(p, lr=0.1, weight_decay=0.5, **started), ranks)
    for i, (x, y) in enumerate(batches(9, 8)):
        if i == 4:
            for opt in (pair.optimizer, pair.reference):
                opt.param_groups[0][name] = value
                if name == "amsgrad" and value:  # torch looks for it, and makes none
                    for state in opt.state.values():
                        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
        pair.both(x * (10 if i < 3 else 0.1), 2, y)
        assert pair.far() < 1e-9, i


def test_schedulers_groups_and_edits(ranks):
    torch.manual_seed(0)

    def groups(net):
        first = [*net.first.parameters(), *net.rare.parameters()]
        others = [*net.second.parameters(), *net.last.parameters()]
        settings = [{"params": first, "weight_decay": 0.1}, {"params": others, "momentum": 0.0}]
        return optim.SGD(settings, lr=0.05, momentum=0.9)

    net = Branches().double()
    alone = copy.deepcopy(net)
    optimizer, reference = groups(net), groups(alone)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in (optimizer, reference)]
    step = TrainStep(net, mse, optimizer, cpu(ranks))
    for i, (x, y) in enumerate(batches(12, 9)):
        if i == 6:
            for each in (optimizer, reference):
                each.param_groups[1]["momentum"] = 0.5
                each.param_groups[1]["dampening"] = 0.3
        step(x, i % 3, y)
        reference.zero_grad()
        mse(alone(x, i % 3), y).backward()
        reference.step()
        for schedule in schedules:
            schedule.step()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(net.parameters(), alone.parameters(), strict=True))
    assert optimizer.flat is not None


@pytest.mark.parametrize("make", [SGD, optim.SGD])
def test_step_hooks_run_once_a_step(make):
    net = Linear()
    optimizer = make(net.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    step = TrainStep(net, mse, optimizer, cpu(2))
    step(rows(4), rows(4, 2))
    step(rows(4), rows(4, 2))
    assert calls == [1, 1]


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
