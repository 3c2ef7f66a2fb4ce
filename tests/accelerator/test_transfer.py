"""Between devices that cannot reach each other, all that the package copies goes by way of the host."""

import copy

import pytest
import torch
from fakes.accelerator import by_the_cuda_backend, device_module
from fakes.as_gpus import gpus  # noqa: F401
from fakes.tensors import numbers
from step.nets import mse
from torch import nn

from mgpu_core import (
    DataParallel,
    DeviceLoader,
    Pipeline,
    Predictor,
    TensorParallel,
    TrainStep,
    comm,
    convert_sync_batchnorm,
    place,
)
from mgpu_core.devices import transfer
from mgpu_core.optim import AdamW

pytestmark = [
    pytest.mark.usefixtures("gpus"),
    pytest.mark.skipif(by_the_cuda_backend(), reason="the core's own copies follow its own list of peers"),
]
TWO, MIXED = ["fake:0", "fake:1"], ["fake:0", "cpu", "fake:1"]


def net():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    return layers.double().to("fake:0")


def batch(device="fake:0"):
    return numbers(12, 3, device=device).double(), numbers(12, 2, device=device).double()


def reduced():
    tensors = [numbers(5, device=each) for each in MIXED]
    comm.all_reduce(tensors)
    return [each.cpu() for each in tensors]


def trained(make, team, wrap=lambda module: module, device="fake:0", **settings):
    module = wrap(net())
    step = TrainStep(module, mse, make(module.parameters()), team, **settings)
    losses = [step(*batch(device)).cpu() for _ in range(4)]
    return [*losses, *(each.detach().cpu() for each in module.parameters())]


def wrapped(team):
    module = net()
    output = DataParallel(convert_sync_batchnorm(module), team)(batch("fake:2")[0])
    output.square().sum().backward()
    return [output.detach().cpu(), *(each.grad.cpu() for each in module.parameters())]


def cut(make):
    module = make(net())
    output = module(batch()[0])
    output.square().sum().backward()
    return [output.detach().cpu(), *(each.grad.cpu() for each in module.parameters())]


def answered():
    with Predictor(net(), TWO, output_device="fake:3") as predict:
        return [predict(batch("fake:2")[0]).cpu() for _ in range(4)]


def loaded():
    batches = [batch("fake:2") for _ in range(3)]
    return [each.joined().cpu() for pair in DeviceLoader(batches, TWO) for each in pair]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(4), nn.Linear(8, 4)

    def forward(self, x, given):
        noise = torch.bernoulli(torch.full_like(x, 0.5))
        return self.norm(self.down(torch.relu(self.up(x + noise + given.offset))))


class Given:
    """No container: it is copied for each rank."""

    def __init__(self):
        self.offset = numbers(12, 4, device="fake:0")


def tensor_parallel():
    model = TensorParallel(Mlp().to("fake:0"), TWO, {"up": "column", "down": "row"})
    torch.manual_seed(1)
    output = model(numbers(12, 4, device="fake:2"), Given())
    output.square().sum().backward()
    state = {name: each.cpu().to("fake:3") for name, each in model.full_state_dict().items()}
    model.load_full_state_dict(state)
    model.load_state_dict(model.state_dict())
    return [output.detach().cpu(), *(each.grad.cpu() for each in model.parameters()), *uncut(model)]


def uncut(model):
    return [each.detach().cpu() for each in model.uncut().state_dict().values()]


def adamw(parameters):
    return AdamW(parameters, lr=0.01)


def torchs(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


CASES = {
    "all_reduce": reduced,
    "step": lambda: trained(adamw, TWO, clip_norm=0.5),
    "step, mixed": lambda: trained(adamw, MIXED, clip_norm=0.5),
    "step, torch's optimizer": lambda: trained(torchs, TWO),
    "step, one rank": lambda: trained(adamw, TWO[:1], device="fake:1"),
    "step, synchronised": lambda: trained(adamw, TWO, convert_sync_batchnorm),
    "wrapper": lambda: wrapped(TWO),
    "wrapper, mixed": lambda: wrapped(MIXED),
    "pipeline": lambda: cut(lambda module: Pipeline(module, TWO, chunks=3)),
    "place": lambda: cut(lambda module: place(module, TWO, ["2"])),
    "predictor": answered,
    "tensor parallel": tensor_parallel,
    "loader": loaded,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nothing_is_copied_directly(monkeypatch, case):
    wanted = case()
    device_module.built.take_direct_copies()
    case()
    assert device_module.built.take_direct_copies(), "the case copies nothing between devices: it shows nothing"
    monkeypatch.setattr(
        transfer, "reach_each_other", lambda one, other: one == other or "cpu" in (one.type, other.type)
    )
    found = case()
    assert device_module.built.take_direct_copies() == []
    torch.testing.assert_close(copy.copy(found), wanted, rtol=0, atol=0)
