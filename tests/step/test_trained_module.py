"""Modules of steps: frozen, moved, rebuilt or changed while it is trained, and free after the end."""

import copy
import gc
import weakref

import pytest
import torch
from fakes.nets import chunks, cpu
from step.nets import RANKS, Branches, Linear, Pair, batches, mse, plain_step, rows, sgd, total
from torch import nn
from torch.optim import AdamW

from mgpu_core import TrainStep

# The module while it is trained.


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_frozen_and_thawed(ranks):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), lambda p: AdamW(p, lr=0.01), ranks)
    for i, (x, y) in enumerate(batches(12, 9)):
        for net in (pair.net, pair.alone):
            net.first.requires_grad_(i % 4 != 1)
        pair.both(x, 2, y)
        assert pair.same_gradients()
    assert pair.far() < 1e-12


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_from_the_start(ranks):
    torch.manual_seed(0)
    net = Branches().double()
    net.second.requires_grad_(False)
    pair = Pair(net, lambda p: AdamW([each for each in p if each.requires_grad], lr=0.01), ranks)
    for i, (x, y) in enumerate(batches(8, 9)):
        if i == 4:
            for each, optimizer in ((pair.net, pair.optimizer), (pair.alone, pair.reference)):
                each.second.requires_grad_(True)
                optimizer.add_param_group({"params": list(each.second.parameters()), "lr": 0.1})
        pair.both(x, 2, y)
    assert pair.far() < 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_and_evaluating_reach_all_ranks(ranks):
    seen = []

    class Net(Linear):
        def forward(self, x):
            seen.append(self.training)
            return super().forward(x)

    net = Net()
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(ranks))
    for mode in (True, False, True):
        net.train(mode)
        seen.clear()
        step(rows(6), rows(6, 2))
        assert seen == [mode] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_running_statistics_are_those_of_rank_0s_rows(ranks):
    means = []

    class Net(nn.BatchNorm1d):
        def forward(self, x):
            means.append(self.running_mean.tolist())
            return super().forward(x)

    net, alone = Net(3), nn.BatchNorm1d(3)
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(ranks))
    parts = rows(9).split(chunks(9, ranks))
    for _ in range(3):
        means.clear()
        step(rows(9), rows(9))
        assert means == [alone.running_mean.tolist()] * ranks  # each step begins with the module's own statistics
        alone(parts[0])
    assert torch.equal(net.running_mean, alone.running_mean)
    assert torch.equal(net.running_var, alone.running_var)
    assert net.num_batches_tracked == 3


def test_values_changed_in_place_are_trained_on():
    net, step = plain_step(2)
    step(rows(4), rows(4, 2))
    with torch.no_grad():
        net.last.weight.fill_(2)
        net.last.bias.zero_()
    _, outputs = step.evaluate(rows(4), rows(4, 2), return_outputs=True)
    assert torch.equal(outputs, 2 * rows(4).sum(1, keepdim=True).expand(4, 2))
    other = Linear()
    net.load_state_dict(other.state_dict())
    _, outputs = step.evaluate(rows(4), rows(4, 2), return_outputs=True)
    assert torch.equal(outputs, other(rows(4)).detach())


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.double(),
        lambda net: setattr(net.last.weight, "data", net.last.weight.data.clone()),
        lambda net: net.load_state_dict(Linear().state_dict(), assign=True),
        lambda net: setattr(net, "more", nn.Linear(3, 2)),
        lambda net: setattr(net, "last", nn.Linear(3, 2)),
        lambda net: net.last.register_parameter("bias", None),
    ],
)
@pytest.mark.parametrize("ranks", RANKS)
def test_moved_and_new_parameters_are_trained_on(change, ranks):
    net, step = plain_step(ranks)
    step(rows(8), rows(8, 2))
    change(net)
    alone, dtype = copy.deepcopy(net), net.last.weight.dtype
    x, y = rows(8).to(dtype), rows(8, 2).to(dtype)
    for _ in range(2):
        total(alone(x), y).backward()
        step(x, y)
        assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)
        alone.load_state_dict(net.state_dict())
        alone.zero_grad()


def test_rebuild_after_a_change():
    net, step = plain_step(2)
    step(rows(4), rows(4, 2))
    net.double()
    step.rebuild()
    loss = step(rows(4).double(), rows(4, 2).double())
    assert loss.dtype == torch.float64
    alone = copy.deepcopy(net)
    total(alone(rows(4).double()), rows(4, 2).double()).backward()
    step(rows(4).double(), rows(4, 2).double())
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)


def test_gradients_of_the_user_are_not_added():
    net, step = plain_step(2)
    alone = copy.deepcopy(net)
    total(alone(rows(4)), rows(4, 2)).backward()
    net.last.weight.grad = torch.full_like(net.last.weight, 100)
    step(rows(4), rows(4, 2))
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)
    step.optimizer.zero_grad()
    net(rows(4)).sum().backward()  # a backward of the user's own between two steps
    step(rows(4), rows(4, 2))
    assert net.last.weight.grad.abs().sum() > 0


# The end.


def test_close_gives_everything_memory_of_its_own():
    net = Linear()
    step = TrainStep(net, mse, AdamW(net.parameters()), cpu(2))
    step(rows(4), rows(4, 2))
    step.close()
    tensors = [*net.parameters(), *step.optimizer.state[net.last.weight].values()]
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in tensors)
    with pytest.raises(RuntimeError, match="closed"):
        step(rows(4), rows(4, 2))
    step.close()
    mse(net(rows(4)), rows(4, 2)).backward()
    step.optimizer.step()


def test_copies_and_saved_states_are_compact():
    net, step = plain_step(2)
    step(rows(4), rows(4, 2))
    for each in copy.deepcopy(net).parameters():
        assert each.untyped_storage().nbytes() == each.nbytes
    state = step.state_dict()
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in state["module"].values())
    before = {name: value.clone() for name, value in state["module"].items()}
    step(rows(4), rows(4, 2))
    assert all(torch.equal(value, before[name]) for name, value in state["module"].items())


def test_a_dropped_step_is_gone_and_the_net_trains_on():
    net, step = plain_step(2)
    step(rows(4), rows(4, 2))
    gone = weakref.ref(step._parts.gradients)
    del step
    gc.collect()
    assert gone() is None
    assert not net.last.weight._post_accumulate_grad_hooks
    again = TrainStep(net, total, sgd(net.parameters()), cpu(3), reduction="sum")
    alone = copy.deepcopy(net)
    total(alone(rows(4)), rows(4, 2)).backward()
    again(rows(4), rows(4, 2))
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)
