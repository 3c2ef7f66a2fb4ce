"""Hooks run once per rank, on parameters once with the sum, and those of a rank stay with it."""

import time

import pytest
import torch
from fakes.nets import Polynomial, cpu, mlp, whole
from fakes.tensors import numbers
from fakes.wrapper import RANKS, SEVERAL
from torch import nn

from mgpu_core import DataParallel


@pytest.mark.parametrize("ranks", RANKS)
def test_hooks_on_parameters_run_once_with_the_sum(ranks):
    plain, net = Polynomial(), Polynomial()
    x = numbers(8, 3)
    plain(x).sum().backward()
    seen, accumulated = [], []
    net.first.weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    net.first.weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert len(seen) == len(accumulated) == 1
    assert torch.equal(seen[0], plain.first.weight.grad)
    assert torch.equal(accumulated[0], 2 * plain.first.weight.grad)
    assert torch.equal(net.first.weight.grad, 2 * plain.first.weight.grad)


@pytest.mark.parametrize("ranks", RANKS)
def test_hooks_run_once_per_rank_and_may_be_added_and_removed(ranks):
    net = Polynomial()
    calls = []
    handles = [
        net.first.register_forward_pre_hook(lambda module, args: calls.append("pre")),
        net.first.register_forward_hook(lambda module, args, out: calls.append("forward") or out * 2),
        net.last.register_full_backward_hook(lambda module, into, out: calls.append("backward")),
        net.register_forward_hook(lambda module, args, kwargs, out: calls.append("kwargs"), with_kwargs=True),
    ]
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 3).requires_grad_()
    wrapper(x).sum().backward()
    assert {kind: calls.count(kind) for kind in calls} == dict.fromkeys(("pre", "forward", "backward", "kwargs"), ranks)
    hooked = wrapper(x)
    assert torch.equal(hooked, net(x))
    for handle in handles:
        handle.remove()
    calls.clear()
    out = wrapper(x)
    out.sum().backward()
    assert calls == []
    assert not torch.equal(out, hooked)


@pytest.mark.parametrize("ranks", RANKS)
def test_hooks_on_the_wrapper_run_once(ranks):
    wrapper = DataParallel(mlp(), cpu(ranks))
    rows = []
    wrapper.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    wrapper(numbers(8, 4))
    assert rows == [8]


class Capturing(nn.Module):
    """Takes an activation the usual way: a hook for the length of the call."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        whole(self)

    def forward(self, x):
        taken = []
        handles = [
            self.inner.register_forward_hook(lambda module, args, out: taken.append(out)),
            self.inner.register_forward_pre_hook(lambda module, args, kwargs: taken.append(args[0]), with_kwargs=True),
        ]
        time.sleep(0.01)  # every rank's hooks are there before any rank computes
        self.inner(x)
        for handle in handles:
            handle.remove()
        taken_in, out = taken
        return taken_in, out


@pytest.mark.parametrize("ranks", SEVERAL)
def test_a_hook_that_a_forward_registers_is_that_ranks_alone(ranks):
    net = Capturing()
    x = numbers(3 * ranks + 1, 2)
    for _ in range(3):
        taken_in, out = DataParallel(net, cpu(ranks))(x)
        assert torch.equal(taken_in, x)
        assert torch.equal(out, net.inner(x))


@pytest.mark.parametrize("ranks", SEVERAL)
def test_a_hook_that_a_forward_leaves_behind_does_not_reach_the_module(ranks):
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            self.inner.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
            self.inner.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
            self.inner.register_full_backward_hook(lambda *_: None)
            self.inner.register_full_backward_pre_hook(lambda *_: None)
            return self.inner(x)

    net = Leaving()
    for _ in range(3):
        DataParallel(net, cpu(ranks))(numbers(2 * ranks, 2)).sum().backward()
    assert not any(value for name, value in vars(net.inner).items() if name.endswith(("_hooks", "_kwargs", "_called")))
