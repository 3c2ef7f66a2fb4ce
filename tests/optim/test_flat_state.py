"""Gradients are in memory once: where autograd made them, unless a kernel cannot read them there."""

import copy
import gc

import pytest
import torch
from torch import nn

from mgpu_core import TrainStep, kernels, optim

SIZES = 251, 257  # of no other test
NBYTES = 4 * 251 * 257
OPTIMIZERS = {
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"lr": 0.1}, 2),
    "amsgrad": (optim.Adam, torch.optim.Adam, {"lr": 0.1, "amsgrad": True}, 3),
}


def pieces():
    """Return how many pieces of memory have about the size of the parameter."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter):
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None and NBYTES <= tensor.numel() * tensor.itemsize < NBYTES + 1024:
                    found[tensor.untyped_storage().data_ptr()] = tensor
    return len(found)


def made(name):
    ours, theirs, settings, _ = OPTIMIZERS[name]
    torch.manual_seed(0)
    net = nn.Linear(SIZES[1], SIZES[0], bias=False)
    twin = copy.deepcopy(net)
    return net, ours(net.parameters(), **settings), twin, theirs(twin.parameters(), **settings)


def data():
    return torch.randn(4, SIZES[1]), torch.randn(4, SIZES[0])


@pytest.mark.parametrize("in_a_step", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_states_and_gradients_have_memory_once(name, in_a_step):
    before = pieces()
    net, optimizer, twin, reference = made(name)
    del twin, reference
    step = TrainStep(net, nn.functional.mse_loss, optimizer, ["cpu"])
    for _ in range(3):
        x, y = data()
        if in_a_step:
            step(x, y)
        else:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        assert pieces() - before == 2 + OPTIMIZERS[name][3]


@pytest.mark.parametrize("turn_of_other_layout", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_of_another_layout_gets_flat_memory_from_then_on(name, turn_of_other_layout):
    before = pieces()
    net, optimizer, twin, reference = made(name)
    for turn in range(5):
        x, y = data()
        for each, its in ((net, optimizer), (twin, reference)):
            its.zero_grad()
            nn.functional.mse_loss(each(x), y).backward()
            if turn == turn_of_other_layout:
                each.weight.grad = each.weight.grad.T.contiguous().T
            its.step()
        torch.testing.assert_close(net.weight, twin.weight)
        own = 2 + OPTIMIZERS[name][3]
        assert pieces() - before == 2 * own + (turn >= turn_of_other_layout)


def test_a_kernel_without_gradients_wants_them():
    values, gradients = torch.ones(4), torch.ones(4)
    segments, groups = kernels.segment_table([4]), kernels.sgd_groups({"lr": 0.5})
    kernel = kernels.FlatKernel("sgd", values, None, [None], segments, groups)
    with pytest.raises(ValueError, match="no gradients of its own"):
        kernel.step()
    kernel.step([gradients])
    assert values.tolist() == [0.5] * 4
