"""Do to a wrapped module all that people do between two forward passes, in any order: it stays the plain module.

Next to each wrapped module stands an equal one that is not wrapped.  What is done to the one is done to the other; all
outputs, gradients, parameters and buffers stay the same.
"""

import copy

import pytest
import torch
from fakes.machines import run_machine
from fakes.nets import cpu
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from step.nets import here
from step.one_device import same
from torch import nn
from torch.nn.utils import parametrizations

from mgpu_core import DataParallel

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """A layer, a factor that is a plain attribute, and a number that runs along."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor = 1.0
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", None)

    def forward(self, x):
        if self.training:
            self.calls += 1
        x = torch.tanh(self.layer(x)) * self.factor
        return x if self.mask is None else x * self.mask


def doubled(module, args, output):
    return output * 2


def shifted(module, args):
    return (args[0] + 1,)


class WrapperMachine(RuleBasedStateMachine):
    """Do to a wrapped module what may be done to it."""

    def __init__(self):
        super().__init__()
        self.net = None

    @initialize(ranks=st.sampled_from([1, 2, 3, 8]), shares=st.booleans(), start=st.integers(0, 99))
    def begin(self, ranks, shares, start):
        self.numbers = torch.Generator().manual_seed(start)
        torch.manual_seed(start)
        self.net = here(nn.Sequential(Block(), Block(), nn.Linear(4, 3)).double())
        self.alone = copy.deepcopy(self.net)
        self.shares = shares
        self.wrap(ranks)

    @rule(ranks=st.sampled_from([1, 2, 3, 8]))
    def wrap(self, ranks):
        shares = [1 + rank % 3 for rank in range(ranks)] if self.shares else None
        self.wrapped = DataParallel(self.net, cpu(ranks), shares=shares)

    def both(self):
        return self.net, self.alone

    def batch(self, rows):
        return here(torch.randn(rows, 4, generator=self.numbers, dtype=torch.float64, device="cpu"))

    # What a forward does.

    @rule(rows=st.integers(1, 9), backward=st.booleans(), again=st.booleans())
    def forward(self, rows, backward, again):
        """Gradients add up until somebody clears them, as ever."""
        x = self.batch(rows)
        pairs = [(self.wrapped(x), self.alone(x))]
        if again:  # two graphs at a time
            pairs.append((self.wrapped(x * 2), self.alone(x * 2)))
        for mine, theirs in pairs:
            assert same(mine, theirs)
            assert mine.requires_grad == theirs.requires_grad
        if backward and pairs[0][0].requires_grad:
            sum((mine**2).sum() for mine, _ in pairs).backward()
            sum((theirs**2).sum() for _, theirs in pairs).backward()

    @rule(rows=st.integers(1, 9), inference=st.booleans())
    def forward_without_a_graph(self, rows, inference):
        x = self.batch(rows)
        with torch.inference_mode() if inference else torch.no_grad():
            mine, theirs = self.wrapped(x), self.alone(x)
        assert same(mine, theirs)
        assert not mine.requires_grad

    @rule(rows=st.integers(1, 5))
    def differentiate_to_the_inputs(self, rows):
        x = self.batch(rows).requires_grad_()
        (mine,) = torch.autograd.grad((self.wrapped(x) ** 3).sum(), [x])
        (theirs,) = torch.autograd.grad((self.alone(x) ** 3).sum(), [x])
        assert same(mine, theirs)

    # What people do to parameters.

    @rule()
    def descend(self):
        for net in self.both():
            with torch.no_grad():
                for each in net.parameters():
                    if each.grad is not None:
                        each -= 0.001 * each.grad.clamp(-1, 1)

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none):
        for net in self.both():
            net.zero_grad(set_to_none=to_none)

    @rule(which=st.integers(0, 1), frozen=st.booleans())
    def freeze(self, which, frozen):
        for net in self.both():
            net[which].layer.requires_grad_(not frozen)

    @rule(which=st.integers(0, 1))
    def replace_a_parameter(self, which):
        weight = self.batch(4)
        for net in self.both():
            if "weight" in net[which].layer._parameters:  # it is not parametrized
                net[which].layer.weight = nn.Parameter(weight.clone())

    @rule(which=st.integers(0, 1))
    def write_through_data(self, which):
        for net in self.both():
            for each in net[which].layer.parameters():
                each.data = each.data * 0.5

    @rule()
    def tie(self):
        for net in self.both():
            net[1].layer = net[0].layer

    @rule(which=st.integers(0, 1), bias=st.booleans())
    def replace_a_layer(self, which, bias):
        layer = nn.Linear(4, 4, bias=bias)
        for net in self.both():
            net[which].layer = here(copy.deepcopy(layer).double())

    @rule(which=st.integers(0, 1))
    def parametrize(self, which):
        for net in self.both():
            if not nn.utils.parametrize.is_parametrized(net[which].layer):
                parametrizations.weight_norm(net[which].layer)

    # What people do to modules.

    @rule(training=st.booleans(), which=st.sampled_from([None, 0, 1]))
    def switch_mode(self, training, which):
        for net in self.both():
            (net if which is None else net[which]).train(training)

    @rule(which=st.integers(0, 1), factor=st.sampled_from([0.5, 1.5]))
    def set_an_attribute(self, which, factor):
        for net in self.both():
            net[which].factor = factor

    @rule(which=st.integers(0, 1), masked=st.booleans())
    def set_a_buffer(self, which, masked):
        mask = self.batch(1)[0]
        for net in self.both():
            net[which].mask = mask.clone() if masked else None

    @rule(which=st.integers(0, 1))
    def replace_a_buffer(self, which):
        for net in self.both():
            net[which].calls = net[which].calls + 10

    @rule(which=st.integers(0, 1))
    def hook(self, which):
        for net in self.both():
            net[which].register_forward_hook(doubled)
            net[which].layer.register_forward_pre_hook(shifted)

    @rule()
    def unhook(self):
        for net in self.both():
            for module in net.modules():
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()

    @rule()
    def insert(self):
        for net in self.both():
            if len(net) < 6:
                net.insert(3, nn.Hardtanh())

    # What is kept and comes back.

    @rule(assign=st.booleans())
    def save_and_load(self, assign):
        for net in self.both():
            state = {name: value.clone() * 1.25 for name, value in net.state_dict().items()}
            net.load_state_dict(state, assign=assign)

    @rule()
    def copy_the_wrapper(self):
        twin = copy.deepcopy(self.wrapped)
        x = self.batch(4)
        calls = [net[which].calls.clone() for net in self.both() for which in (0, 1)]
        assert same(twin(x), twin.module(x))
        assert all(map(torch.equal, calls, [net[which].calls for net in self.both() for which in (0, 1)]))

    @rule()
    def go_on_in_a_copy(self):
        self.net = copy.deepcopy(self.net)
        self.alone = copy.deepcopy(self.alone)
        self.wrap(3)

    @rule(dtype=st.sampled_from([torch.float32, torch.float64]))
    def cast_there_and_back(self, dtype):
        for net in self.both():
            net.to(dtype).to(torch.float64)

    # What always holds.

    @invariant()
    def is_the_plain_module(self):
        if self.net is None:
            return
        mine, theirs = (dict(net.named_parameters(remove_duplicate=False)) for net in self.both())
        assert list(mine) == list(theirs)
        for name, each in mine.items():
            assert same(each, theirs[name]), name
            assert (each.grad is None) == (theirs[name].grad is None), name
            assert each.grad is None or same(each.grad, theirs[name].grad), name
        for (name, one), other in zip(self.net.named_buffers(), self.alone.buffers(), strict=True):
            assert same(one, other), name


@pytest.mark.parametrize("start", [1, 2])
def test_a_wrapped_module_is_itself_whatever_comes_between(start):
    run_machine(WrapperMachine, start)
