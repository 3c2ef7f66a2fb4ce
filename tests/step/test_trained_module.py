"""Modules of steps: frozen, moved, rebuilt or changed while it is trained, and free after the end."""

import copy
import gc
import weakref

import pytest
import torch
from fakes.nets import chunks, cpu
from step.nets import Linear, mse, plain_step, rows, sgd, total
from torch import nn
from torch.optim import AdamW

from mgpu_core import TrainStep

# The module while it is trained.


def test_running_statistics_are_those_of_rank_0s_rows(ranks):
    means = []

    class Net(nn.BatchNorm1d):
        def forward(self, x):
            means.append(self.running_mean.tolist())
            return super().forward(x)

    net, alone = Net(3), nn.BatchNorm1d(3)
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(ranks))
    parts = rows(24).split(chunks(24, ranks))
    for _ in range(3):
        means.clear()
        step(rows(24), rows(24))
        assert means == [alone.running_mean.tolist()] * ranks  # each step begins with the module's own statistics
        alone(parts[0])
    assert torch.equal(net.running_mean, alone.running_mean)
    assert torch.equal(net.running_var, alone.running_var)
    assert net.num_batches_tracked == 3


@pytest.mark.parametrize("rebuilds", [True, False])
def test_a_net_of_another_dtype_is_trained_on(rebuilds, ranks):
    net, step = plain_step(ranks)
    step(rows(8), rows(8, 2))
    net.double()
    if rebuilds:
        step.rebuild()
    x, y = rows(8).double(), rows(8, 2).double()
    for _ in range(2):
        alone = copy.deepcopy(net)
        alone.zero_grad()
        total(alone(x), y).backward()
        assert step(x, y).dtype == torch.float64
        assert torch.equal(net.last.weight.grad, alone.last.weight.grad)


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
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None
    assert not net.last.weight._post_accumulate_grad_hooks
    again = TrainStep(net, total, sgd(net.parameters()), cpu(3), reduction="sum")
    alone = copy.deepcopy(net)
    total(alone(rows(4)), rows(4, 2)).backward()
    again(rows(4), rows(4, 2))
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)
