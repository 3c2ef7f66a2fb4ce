"""What the user changes in the optimizer, and what it does by itself, on several devices."""

import pytest
import torch
from torch import nn
from torch.optim import RMSprop
from train.nets import Pair, batches
from train.test_noticed import Assigning, halved, sgd

from mgpu_core import TrainStep, optim

TEAMS = [["fake:0", "fake:1"], ["fake:0", "fake:1", "fake:0"], ["fake:2", "fake:0", "cpu"]]


def rmsprop(parameters):
    return RMSprop(parameters, lr=0.01)


def assert_equal(pair, device, prepare=lambda _: None):
    with torch.device(device):
        for optimizer in (pair.optimizer, pair.reference):
            prepare(optimizer)
        for x, y in batches(4, 11):
            pair.both(x, y)
    assert pair.far() < 1e-12
    pair.step.check_replicas()


def pair_on(devices, make):
    torch.manual_seed(0)
    return Pair(nn.Linear(4, 2).double().to(devices[0]), make, devices)


@pytest.mark.parametrize("devices", TEAMS)
@pytest.mark.parametrize("make", [sgd, rmsprop])
@pytest.mark.filterwarnings("ignore:the fused kernels do not serve")
def test_a_step_that_was_replaced_is_called_once(make, devices):
    calls = []
    assert_equal(pair_on(devices, make), devices[0], lambda optimizer: calls.append(halved(optimizer)))
    assert [len(each) for each in calls] == [4, 4]


@pytest.mark.parametrize("devices", TEAMS)
@pytest.mark.parametrize("make", [sgd, rmsprop])
def test_a_state_holds_something_else(make, devices):
    assert_equal(pair_on(devices, make), devices[0], lambda optimizer: optimizer.state.update(epoch=3))


@pytest.mark.parametrize("devices", TEAMS)
def test_an_optimizer_may_put_parameters_elsewhere(devices):
    assert_equal(pair_on(devices, Assigning), devices[0])


@pytest.mark.parametrize("shards", [True, False])
def test_a_parameter_that_has_become_smaller_is_noticed(shards):
    net = nn.Linear(4, 8, bias=False).to("fake:0")
    devices = ["fake:0", "fake:1"]
    step = TrainStep(
        net, lambda output, _: (output * output).sum(), optim.SGD(net.parameters()), devices, shard_optimizer=shards
    )
    x = torch.ones(4, 4, device="fake:0")
    step(x, x)
    net.weight.data = net.weight.data[:1]
    with pytest.raises(RuntimeError, match="parameter weight was moved"):
        step(x, x)
