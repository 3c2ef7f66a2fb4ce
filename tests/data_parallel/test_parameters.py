"""Parameters of every kind: lists, sparse, complex, mixed dtypes, and weights that are computed."""

import copy
import warnings
from types import MethodType

import pytest
import torch
from fakes.nets import Embedded, cpu, in_a_new_thread, whole
from fakes.tensors import numbers
from fakes.wrapper import agree, equal_gradients, gradients
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from mgpu_core import DataParallel


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([numbers(2, 2), numbers(2, 2) + 1])
        self.named = nn.ParameterDict({"a": numbers(2), "b": numbers(2) - 1})

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        assert len(self.weights) == len(self.named) == 2
        return x * self.named["a"] + sum(self.named.values())


def test_parameter_list_and_dict(ranks):
    with warnings.catch_warnings(action="error"):
        agree(Lists(), ranks, numbers(8, 2))


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_embedding_gradients(ranks, sparse):
    plain = Embedded(sparse)
    net = copy.deepcopy(plain)
    x = torch.tensor([[0, 1], [1, 2], [2, 0], [5, 5], [0, 1], [3, 0], [1, 1], [2, 5]])
    weights = numbers(8, 2, 3)
    (DataParallel(net, cpu(ranks))(x) * weights).sum().backward()
    (plain(x) * weights).sum().backward()
    grad = net.embedding.weight.grad
    assert grad.is_sparse == sparse
    wanted = plain.embedding.weight.grad
    assert torch.equal(grad.to_dense() if sparse else grad, wanted.to_dense() if sparse else wanted)
    torch.optim.SGD(net.parameters(), 1.0).step()


def test_complex_parameters(ranks):
    net = nn.Module()
    net.weight = nn.Parameter(torch.complex(numbers(3, 2), numbers(3, 2) + 1))
    net.forward = MethodType(lambda self, x: (x.to(torch.complex64) @ self.weight).abs().pow(2), net)
    x = numbers(8, 3)
    (wanted,) = torch.autograd.grad(net(x).sum(), net.weight)
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert net.weight.grad.dtype is torch.complex64
    torch.testing.assert_close(net.weight.grad, wanted)


def test_channels_last(ranks):
    net = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).double().to(memory_format=torch.channels_last)
    )
    x = torch.randn(8, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    got = agree(net, ranks, x)
    assert got[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert DataParallel(net, cpu(ranks))(x).is_contiguous(memory_format=torch.channels_last)


class Mixed(nn.Module):
    """Two dtypes, two buckets."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.bfloat16)
        whole(self)

    def forward(self, x):
        return self.last(self.first(x).bfloat16()).double()


def test_mixed_dtypes(ranks):
    plain = Mixed()
    net = copy.deepcopy(plain)
    x = numbers(8, 3).double() / 4
    DataParallel(net, cpu(ranks))(x).sum().backward()
    plain(x).sum().backward()
    for name, grad in gradients(plain).items():
        assert net.get_parameter(name).grad.dtype is grad.dtype
        torch.testing.assert_close(net.get_parameter(name).grad, grad, rtol=2e-2, atol=2e-2)


@pytest.mark.cpu_only("several devices have several autograd threads, and no order between them")
def test_last_bucket_is_reduced_before_the_last_modules_backward():
    order = []
    net = Mixed()
    net.first.register_full_backward_hook(lambda *_: order.append("backward of first"))
    net.last.weight.register_hook(lambda _: order.append("reduced last"))
    net.first.weight.register_hook(lambda _: order.append("reduced first"))
    x = numbers(9, 3).double().requires_grad_()

    def step():
        order.clear()
        DataParallel(net, cpu(3))(x).sum().backward()

    for _ in range(3):
        step()
        assert order.count("backward of first") == 3
        in_a_new_thread(step)
        assert order.count("backward of first") == 3
        assert order.index("reduced last") < max(i for i, each in enumerate(order) if each == "backward of first")
        assert order.index("reduced first") > order.index("reduced last")


class Doubling(nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrized():
    net = whole(nn.Linear(3, 2).double())
    parametrize.register_parametrization(net, "weight", Doubling())
    return net


WEIGHTS = {
    "parametrization": parametrized,
    "parametrizations.weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 2).double()),
    "weight_norm": lambda: torch.nn.utils.weight_norm(nn.Linear(3, 2).double()),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 2).double()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WEIGHTS)
def test_computed_weights(kind, ranks):
    plain, net = WEIGHTS[kind](), WEIGHTS[kind]()
    net.load_state_dict(plain.state_dict())
    x = numbers(8, 3).double()
    plain(x).pow(2).sum().backward()
    out = DataParallel(net, cpu(ranks))(x)
    torch.testing.assert_close(out, plain(x))
    out.pow(2).sum().backward()
    equal_gradients(net, plain)


@pytest.mark.cpu_only("torch's cache of parametrizations is one for all replicas, whose devices differ")
@pytest.mark.filterwarnings("ignore")
def test_cached_parametrization(ranks):
    plain, net = parametrized(), parametrized()
    x = numbers(8, 3).double()
    plain(x).sum().backward()
    with parametrize.cached():
        DataParallel(net, cpu(ranks))(x).sum().backward()
    equal_gradients(net, plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [torch.nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm_keeps_its_vectors_in_the_wrapped_module(kind, ranks):
    torch.manual_seed(0)
    plain = kind(nn.Linear(4, 3).double())
    torch.manual_seed(0)
    net = kind(nn.Linear(4, 3).double())
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 4).double()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    for _ in range(3):
        torch.testing.assert_close(wrapper(x), plain(x))
    assert before
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(net.get_buffer(name), buffer)
        assert not torch.equal(buffer, before[name])
    wrapper(x).sum().backward()
    plain(x).sum().backward()
    equal_gradients(net, plain)
