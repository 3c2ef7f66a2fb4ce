"""A step launches its work and waits for none of it: neither for a number, nor for a copy that blocks.

Through the core's CUDA backend, whose kernels wait for nothing; the torch backend's plain references look at numbers.
"""

import pytest
import torch
from fakes.accelerator import by_the_cuda_backend, device_module
from fakes.graphs import give_graphs, without_gpu
from step.nets import Branches, mse
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from mgpu_core import TrainStep, optim

pytestmark = pytest.mark.skipif(not by_the_cuda_backend(), reason="the torch backend is not made to be fast")

TEAMS = [["fake:0"], ["fake:0", "fake:0"], ["fake:0", "fake:1"]]
OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "lion": lambda p: optim.Lion(p, lr=0.01),
}


def weighted(output, target):
    return ((output - target) ** 2).sum(), len(output), {"half": 0.5}


def waits_of(step, schedule, x, y, steps=5, warm_up=17):
    """Return the waits of some steps, after those in which kinds are counted, ways measured, and graphs recorded.

    Steps 16 and 32 compare their losses, and read numbers.
    """
    for index in range(warm_up + steps):
        if index == warm_up:
            device_module.built.take_host_waits()
        step(x, y)
        schedule.step()
    return device_module.built.take_host_waits()


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to("fake:0")


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("team", TEAMS, ids="-".join)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_host_waits_for_nothing_in_a_step(monkeypatch, make, team, captured):
    """The learning rate changes from step to step."""
    if captured:
        give_graphs(monkeypatch, "fake")
    module = net()
    optimizer = make(module.parameters())
    step = TrainStep(module, mse, optimizer, team, clip_norm=0.5, capture=captured, error_if_nonfinite=False)
    step = without_gpu(step) if captured else step
    x, y = torch.ones(8, 3, device="cpu"), torch.ones(8, 2, device="cpu")
    assert waits_of(step, ExponentialLR(optimizer, 0.999), x, y) == []
    assert not captured or step.graphs.replays > 5


@pytest.mark.parametrize("team", TEAMS, ids="-".join)
def test_numbers_next_to_the_loss_are_copied_without_a_wait(team):
    module = net()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    step = TrainStep(module, weighted, optimizer, team, reduction="weighted", error_if_nonfinite=False)
    x, y = torch.ones(8, 3, device="cpu"), torch.ones(8, 2, device="cpu")
    assert waits_of(lambda *batch: step(*batch, aux=True), ExponentialLR(optimizer, 0.999), x, y) == []


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_batches_that_use_other_parameters_are_not_waited_for(make):
    """Which segments take part in an update is written into a table on the device."""
    module = Branches().to("fake:0")
    step = TrainStep(module, mse, make(module.parameters()), TEAMS[1], error_if_nonfinite=False)
    x, y = torch.ones(8, 4, device="cpu"), torch.ones(8, 2, device="cpu")
    for index in range(23):
        if index == 17:  # step 16 has compared its losses
            device_module.built.take_host_waits()
        step(x, index % 2, y)
    assert device_module.built.take_host_waits() == []
