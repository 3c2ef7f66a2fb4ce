"""Gradients are those of one device: sums, double backward, frozen and unused parameters."""

from types import MethodType

import pytest
import torch
from fakes.nets import Polynomial, Tied, cpu, mlp, whole
from fakes.tensors import numbers
from fakes.wrapper import Lambda, agree
from torch import nn

from mgpu_core import DataParallel


@pytest.mark.parametrize("rows", [8, 11])
def test_gradients_are_summed_and_equal_one_devices_exactly(ranks, rows):
    net = agree(Polynomial(), ranks, numbers(rows, 3), loss=torch.sum)
    assert all(parameter.grad.abs().sum() > 0 for parameter in net.parameters())


def test_autograd_grad_reaches_the_wrapped_parameters_and_the_input(ranks):
    net, x = Polynomial(), numbers(8, 3).requires_grad_()
    inputs = [x, *net.parameters()]
    got = torch.autograd.grad(DataParallel(net, cpu(ranks))(x).sum(), inputs)
    for one, other in zip(got, torch.autograd.grad(net(x).sum(), inputs), strict=True):
        assert torch.equal(one, other)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_double_backward(ranks):
    net, x = Polynomial(), numbers(8, 3).requires_grad_()

    def penalty(forward):
        grads = torch.autograd.grad(forward(x).sum(), [x, *net.parameters()], create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in grads), [x, *net.parameters()], allow_unused=True)

    for one, other in zip(penalty(DataParallel(net, cpu(ranks))), penalty(net), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


class OnePerRow(nn.Module):
    """Each row has one of two layers: a rank may use one alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        whole(self)

    def forward(self, x):
        found = x.new_zeros(x.shape)
        for layer, rows in zip(self.layers, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if rows.any():
                found = found.index_put((rows.nonzero()[:, 0],), layer(x[rows]) ** 2)
        return found


def test_double_backward_where_ranks_use_other_parameters(ranks):
    net, x = OnePerRow(), numbers(8, 3).abs() + 1
    x[4:, 0] *= -1

    def penalty(forward):
        grads = torch.autograd.grad(forward(x).sum(), list(net.parameters()), create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in grads), list(net.parameters()))

    for one, other in zip(penalty(DataParallel(net, cpu(ranks))), penalty(net), strict=True):
        assert torch.equal(one, other)


@pytest.mark.cpu_only("torch's own operators crash on tensors without memory that are on a device of this kind")
def test_gradients_that_are_zero_everywhere(ranks):
    """Torch has tensors without memory for them: from the sign of a parameter, and the curvature of an L1 loss."""
    net, x = Polynomial(), numbers(8, 3).requires_grad_()

    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x) + self.net.first.bias.sgn().sum()

    def penalty(forward):
        found = forward(x)
        loss = nn.functional.l1_loss(found, torch.zeros_like(found), reduction="sum")
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad((grad * grad).sum() + found.sum(), list(net.parameters()))

    signed = Signed()
    for one, other in zip(penalty(DataParallel(signed, cpu(ranks))), penalty(signed), strict=True):
        assert torch.equal(one, other)


def test_tied_weights(ranks):
    net = agree(Tied().double(), ranks, torch.arange(16).reshape(8, 2) % 7)
    assert net.out.weight is net.embedding.weight


def test_all_parameters_frozen(ranks):
    net = mlp().requires_grad_(False)
    assert not DataParallel(net, cpu(ranks))(numbers(8, 4)).requires_grad
    x = numbers(8, 4).requires_grad_()
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_unused_parameters_get_no_gradient(ranks):
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    net.forward = MethodType(lambda self, x: self["used"](x), net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.5)
    before = net["unused"].weight.detach().clone()
    DataParallel(net, cpu(ranks))(numbers(8, 2)).sum().backward()
    assert net["unused"].weight.grad is None
    assert net["used"].weight.grad is not None
    optimizer.step()
    assert torch.equal(net["unused"].weight, before)


@pytest.mark.several_ranks
def test_parameter_used_on_one_rank_only(ranks):
    net = Lambda(lambda self, x: self.linear(x) if (x == 5).all() else x * 1.0)
    x = torch.zeros(ranks, 2)
    x[-1] = 5
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert net.linear.weight.grad.tolist() == [[5, 5], [5, 5]]
    assert net.linear.bias.grad.tolist() == [1, 1]


def test_buffers_that_require_grad(ranks):
    net = Lambda(lambda self, x: self.linear(x) * self.scale)
    net.register_buffer("scale", torch.tensor([2.0, 3.0], requires_grad=True))
    x = numbers(8, 2)
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert torch.equal(net.scale.grad, net.linear(x).sum(0))


def test_batched_gradients_are_refused_by_name():
    model, x = DataParallel(nn.Linear(2, 2), cpu(2)), numbers(4, 2).requires_grad_()
    out = model(x)
    with pytest.raises(TypeError, match="inside a torch"):
        torch.autograd.grad(out, x, torch.ones(3, 4, 2), is_grads_batched=True)
