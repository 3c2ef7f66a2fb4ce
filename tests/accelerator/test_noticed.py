"""What the user changes in the optimizer, and what it does by itself, on several devices."""

import pytest
import torch
from changes.table import Assigning
from step.nets import Pair, batches
from torch import nn
from torch.optim import SGD, RMSprop

from mgpu_core import TrainStep

TEAMS = [["fake:0", "fake:1"], ["fake:0", "fake:1", "fake:0"], ["fake:2", "fake:0", "cpu"]]


def sgd(parameters):
    return SGD(parameters, lr=0.05, momentum=0.9, dampening=0.5)


def rmsprop(parameters):
    return RMSprop(parameters, lr=0.01)


def halved(optimizer):
    """Halves each gradient before the step, as whoever replaces ``step`` might."""
    original, calls = optimizer.step, []

    def step(closure=None):
        calls.append(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return original(closure)

    optimizer.step = step
    return calls


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


@pytest.mark.parametrize("devices", [["fake:0", "fake:1"]])
def test_a_loss_may_need_outputs_on_the_host(devices):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x).cpu()

    def loss_fn(out, y):  # each row is compared with all others
        return nn.functional.cross_entropy(out @ out.T, torch.arange(len(out), device="cpu")) + 0 * y.sum().cpu()

    net = Net().to(devices[0])
    step = TrainStep(net, loss_fn, SGD(net.parameters(), 0.1), devices)
    with pytest.warns(UserWarning, match="compares rows of different ranks"):
        step(torch.ones(6, 2, device=devices[0]), torch.ones(6, device=devices[0]))
