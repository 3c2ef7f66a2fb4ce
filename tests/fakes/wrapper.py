"""Build what the tests of the wrapper share: a module of any function, and a comparison with one device."""

import copy

import torch
from fakes.nets import cpu, whole
from torch import nn

from mgpu_core import DataParallel, _core


class Lambda(nn.Module):
    """A linear layer around a function of its own: ``function(module, x)``."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.linear = whole(nn.Linear(2, 2))
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def gradients(net):
    """Return the gradient of each parameter by name; None where there is none."""
    return {name: p.grad for name, p in net.named_parameters()}


def equal_gradients(net, plain):
    """Assert that both modules have the same gradients, and miss the same ones."""
    torch.testing.assert_close(gradients(net), gradients(plain), rtol=1e-9, atol=1e-11)


def agree(plain, ranks, *inputs, loss=lambda out: out.pow(2).sum(), dim=0):
    """Compare output and gradients of the plain module and of a wrapped deep copy; return the copy."""
    net = copy.deepcopy(plain)
    _core.reset_counters()
    got = DataParallel(net, cpu(ranks), dim=dim)(*inputs)
    used = {rank for operation, _, rank in _core.counters() if operation == "gather"}
    assert len(used) == (ranks if ranks > 1 else 0), "not every rank ran"
    wanted = plain(*inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    loss(got).backward()
    loss(wanted).backward()
    equal_gradients(net, plain)
    return net
