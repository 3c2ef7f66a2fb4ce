"""Modules of every kind: recurrent, scripted, lazy, without parameters, and with copies of their own."""

import copy
from types import MethodType

import pytest
import torch
from fakes.nets import Lstm, cpu, mlp, whole
from fakes.tensors import numbers
from fakes.wrapper import agree, equal_gradients
from torch import nn

from mgpu_core import DataParallel, _core


def test_lstm(ranks):
    agree(Lstm().double(), ranks, torch.randn(8, 3, 4, dtype=torch.float64))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, mask):
        return self.attention(x, x, x, key_padding_mask=mask)[0]


def test_multihead_attention(ranks):
    mask = torch.arange(5).expand(8, 5) > torch.arange(8)[:, None] % 4
    agree(Attention().double(), ranks, torch.randn(8, 5, 4, dtype=torch.float64), mask)


@pytest.mark.filterwarnings("ignore")
def test_script_module(ranks):
    plain = mlp().double()
    net = torch.jit.script(copy.deepcopy(plain))
    x = numbers(8, 4).double()
    _core.reset_counters()
    out = DataParallel(net, cpu(ranks))(x)
    torch.testing.assert_close(out, plain(x))
    assert sum(op == "gather" for op, _, _ in _core.counters()) == (ranks if ranks > 1 else 0)
    out.sum().backward()
    plain(x).sum().backward()
    equal_gradients(net, plain)


class Own(nn.Linear):
    """As libraries write it: torch's copy, and something of their own."""

    made = 0

    def _replicate_for_data_parallel(self):
        Own.made += 1
        replica = super()._replicate_for_data_parallel()
        replica.factor = 2
        return replica

    def forward(self, x):
        return super().forward(x) * self.factor


@pytest.mark.several_ranks
def test_own_replicate_for_data_parallel_is_called(ranks):
    Own.made = 0
    net = whole(Own(2, 2))
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x)
    assert Own.made == ranks
    assert torch.equal(out, 2 * nn.functional.linear(x, net.weight, net.bias))
    assert not hasattr(net, "factor")


@pytest.mark.several_ranks
def test_lazy_modules_are_refused(ranks):
    net = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    _core.reset_counters()
    with pytest.raises(ValueError, match="Run a dummy forward pass"):
        DataParallel(net, cpu(ranks))(numbers(8, 4))
    assert _core.counters() == {}, "the contract says: raises before anything is copied"
    net(numbers(8, 4))
    assert DataParallel(net, cpu(ranks))(numbers(8, 4)).shape == (8, 2)


@pytest.mark.parametrize("ranks", [0, 1])
def test_one_device_initialises_lazy_modules_as_in_torch(ranks):
    net = nn.LazyLinear(2)
    out = DataParallel(net, cpu(ranks))(numbers(8, 4))
    assert torch.equal(out, net(numbers(8, 4)))


def test_module_without_parameters(ranks):
    x = numbers(8, 2)
    assert torch.equal(DataParallel(nn.ReLU(), cpu(ranks))(x), torch.relu(x))


class Holder(nn.Module):
    """Keeps bound methods of its own and of its child, and its forward replaced on the instance."""

    def __init__(self):
        super().__init__()
        self.inner = whole(nn.Linear(2, 2))
        self.step = self.own
        self.table = {"none": None}
        self.forward = MethodType(Holder.other, self)

    def own(self, x):
        return self.inner(x) * 3

    def other(self, x):
        return self.step(x) + self.inner.weight.sum()


@pytest.mark.several_ranks
def test_bound_methods_in_attributes_run_on_the_twins_weights(ranks):
    net = Holder()
    pointers = []
    net.inner.register_forward_pre_hook(lambda module, args: pointers.append(module.weight.data_ptr()))
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x)
    assert len(set(pointers)) == ranks
    wanted = Holder()
    assert torch.equal(out, wanted(x))


@pytest.mark.cpu_only("a frozen script has its weights as constants, on one device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.several_ranks
def test_frozen_scripts(ranks):
    net = torch.jit.freeze(torch.jit.script(whole(nn.Linear(2, 2)).eval()))
    x = numbers(2 * ranks, 2)
    assert torch.equal(DataParallel(net, cpu(ranks))(x), net(x))
