"""Activation checkpoints inside and outside of the wrapper."""

import copy

import pytest
import torch
from fakes.nets import Polynomial, chunks, cpu, mlp
from fakes.tensors import numbers
from fakes.wrapper import RANKS, equal_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_core import DataParallel


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant, self.runs = mlp().double(), reentrant, []

    def forward(self, x):
        self.runs.append(len(x))
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoint_inside(ranks, reentrant):
    net = Checkpointed(reentrant)
    calls = []
    net.inner[0].register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    plain = copy.deepcopy(net.inner)
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    out = DataParallel(net, cpu(ranks))(x)
    assert len(calls) == ranks
    out.pow(2).sum().backward()
    assert sorted(calls) == sorted(2 * chunks(8, ranks))  # each rank ran again in backward
    y = x.detach().clone().requires_grad_()
    plain(y).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    equal_gradients(net.inner, plain)


class CheckpointedMethod(nn.Module):
    """Runs a method that it keeps in an attribute again in backward, when the forward's twins are gone."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant, self.run = Polynomial(), reentrant, self.own

    def own(self, x):
        return self.inner(x)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoint_of_a_bound_method_in_an_attribute(ranks, reentrant):
    net, plain = CheckpointedMethod(reentrant), Polynomial()
    x = numbers(8, 3)
    DataParallel(net, cpu(ranks))(x.clone().requires_grad_()).sum().backward()
    plain(x).sum().backward()
    equal_gradients(net.inner, plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoint_outside(ranks, reentrant):
    plain = mlp().double()
    net = copy.deepcopy(plain)
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    checkpoint(DataParallel(net, cpu(ranks)), x, use_reentrant=reentrant).pow(2).sum().backward()
    plain(y).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    equal_gradients(net, plain)
