"""Hooks run once per rank, on parameters once with the sum, and those of a rank stay with it."""

import time

import pytest
import torch
from fakes.nets import Polynomial, cpu, mlp, whole
from fakes.tensors import numbers
from torch import nn

from mgpu_core import DataParallel


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


@pytest.mark.several_ranks
def test_a_hook_that_a_forward_registers_is_that_ranks_alone(ranks):
    net = Capturing()
    x = numbers(3 * ranks + 1, 2)
    for _ in range(3):
        taken_in, out = DataParallel(net, cpu(ranks))(x)
        assert torch.equal(taken_in, x)
        assert torch.equal(out, net.inner(x))


@pytest.mark.several_ranks
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
