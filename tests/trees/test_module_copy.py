"""Copies of a module that live on: attributes of parameters, saved activations, what cannot be copied."""

import threading
import warnings

import pytest
import torch
from fakes.nets import Scaled, cpu
from torch import nn
from torch.nn.utils import parametrizations, prune

from mgpu_core import Predictor
from mgpu_core.trees.module_copy import copy_module

warnings.filterwarnings("ignore", category=FutureWarning)


class Masked(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.weight.mask, self.bias)


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Scaled(torch.rand(3, 4), 5)

    def forward(self, x):
        return x @ self.weight.T * self.weight.scale


class Saves(nn.Module):
    """Keeps activations, with their graph, in attributes."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 3), {"all": []}

    def forward(self, x):
        made = self.layer(x)
        self.kept = {"all": [made]}
        return made


def masked():
    net = Masked(4, 3)
    net.weight.mask = torch.tensor([[1.0], [0.0], [2.0]])
    return net


def buffered():
    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(3))
            self.table.offset = 7.0

        def forward(self, x):
            return x[:, :3] * self.table + self.table.offset

    return Tagged()


NETS = {
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 3)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
    "a parametrization": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5),
    "saved activations": Saves,
    "an attribute of a parameter": masked,
    "a subclass of Parameter": Quantised,
    "an attribute of a buffer": buffered,
}


@pytest.mark.parametrize("kind", NETS)
def test_copies_compute_as_the_module_does(kind):
    torch.manual_seed(0)
    net, x = NETS[kind](), torch.randn(5, 4)
    if list(net.parameters()):
        net(x).sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
        net(x)  # leaves tensors with a graph in attributes
    copied = copy_module(net)
    assert torch.equal(copied.eval()(x), net.eval()(x))
    assert all(one is not other for one, other in zip(net.parameters(), copied.parameters(), strict=True))
    net.train()
    on = x.to(cpu(1)[0])
    with warnings.catch_warnings(), Predictor(net, cpu(2)) as predict:
        warnings.simplefilter("ignore")
        for _ in range(2):
            expected = copy_module(net).eval().to(on.device)(on).detach()
            assert torch.allclose(predict(on), expected)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(2)
            predict.refresh()


def test_ranks_of_one_device_share_parameters_with_their_attributes():
    net = masked()
    first = copy_module(net)
    second = copy_module(net, {id(net.weight): first.weight})
    assert second.weight is first.weight
    assert first.weight.mask is not None
    assert second.bias is not first.bias


def test_attributes_that_are_set_later_are_those_of_the_module_alone():
    net = masked()
    copied = copy_module(net)
    net.weight.other = 1
    assert not hasattr(copied.weight, "other")


class Native:
    """A handle of a library."""

    def __init__(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize("make", [Native, threading.Lock, lambda: open(__file__)])  # noqa: SIM115
@pytest.mark.parametrize("copied", [copy_module, lambda net: Predictor(net, ["cpu"])])
def test_what_cannot_be_copied_is_named(make, copied):
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    net[1][0].handle = make()
    kind = type(net[1][0].handle).__name__
    with pytest.raises(TypeError, match=rf"net\.1\.0\.handle \(a {kind}\) cannot be copied.*cannot pickle"):
        copied(net)
