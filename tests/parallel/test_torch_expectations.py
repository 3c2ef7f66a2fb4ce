"""Expectations of torch's own tests of scatter, gather and replicate."""

import io
from collections import namedtuple
from typing import NamedTuple

import pytest
import torch
from fakes.two_devices import HOME, OTHER, TEAM, linear, rows
from torch import nn

from mgpu_core import gather, replicate, scatter


def test_scatter_and_its_gradient():
    x = rows(4).requires_grad_()
    parts = scatter(x, TEAM)
    assert [part.device for part in parts] == [HOME, OTHER]
    assert torch.equal(parts[0], x[:2])
    assert torch.equal(parts[1], x[2:])
    parts[0].backward(torch.full_like(parts[0], 2))
    assert x.grad.tolist() == [[2.0] * 3] * 2 + [[0.0] * 3] * 2
    assert torch.autograd.gradcheck(lambda x: scatter(x, TEAM), (x,))
    assert torch.autograd.gradgradcheck(lambda x: scatter(x, TEAM), (x,))


@pytest.mark.parametrize("target", [HOME, OTHER, "cpu"], ids=str)
@pytest.mark.parametrize("shape", [(2, 4), ()], ids=str)
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_gather_and_its_gradient(target, shape):
    inputs = [torch.full(shape, value, dtype=torch.float64, device=device) for value, device in enumerate(TEAM)]
    inputs = [each.requires_grad_() for each in inputs]
    result = gather(inputs, target)
    assert result.device == torch.device(target)
    assert result.shape == ((4, 4) if shape else (2,))
    half = len(result) // 2
    assert torch.equal(result[:half].view(shape), inputs[0])
    assert torch.equal(result[half:].view(shape), inputs[1])
    gradient = torch.arange(result.numel(), dtype=torch.float64, device=target).view(result.shape)
    result.backward(gradient)
    assert torch.equal(inputs[0].grad, gradient[:half].view(shape))
    assert torch.equal(inputs[1].grad, gradient[half:].view(shape))
    assert torch.autograd.gradcheck(lambda *each: gather(each, target), inputs)
    assert torch.autograd.gradgradcheck(lambda *each: gather(each, target), inputs)


def test_gather_refuses_dicts_of_different_keys():
    inputs = ({"a": rows(device=HOME)}, {"b": rows(device=OTHER), "a": rows(device=OTHER)})
    with pytest.raises(ValueError, match="All dicts must have the same number of keys"):
        gather(inputs, HOME)


@pytest.mark.parametrize("devices", [tuple(TEAM), list(TEAM)], ids=["tuple", "list"])
def test_replicas_compute_on_their_devices(devices):
    net, x = linear(), rows()
    for rank, twin in enumerate(replicate(net, devices)):
        assert twin.weight.device == torch.device(devices[rank])
        assert torch.equal(twin(x.to(devices[rank])), net(x))
    norm = nn.Module()
    norm.bn = nn.BatchNorm2d(10).to(HOME)
    for rank, twin in enumerate(replicate(norm, devices)):
        assert all(buffer.device == torch.device(devices[rank]) for buffer in twin.bn.buffers())


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_can_be_saved(detach):
    file = io.BytesIO()
    torch.save(replicate(linear(), TEAM, detach), file)
    assert file.getvalue()


Pair = namedtuple("Pair", "a b")


class Typed(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize("kind", [Pair, Typed])
def test_named_tuples_are_scattered_and_gathered_as_they_are(kind):
    given = kind(rows(4), rows(4) + 1)
    parts = scatter(given, TEAM)
    assert [type(part) for part in parts] == [kind, kind]
    assert [(part.a.device, part.b.device) for part in parts] == [(HOME, HOME), (OTHER, OTHER)]
    crossed = [kind(parts[0].a, parts[0].b.to(OTHER)), kind(parts[1].a.to(HOME), parts[1].b)]
    for target in (HOME, "cpu"):
        for outputs in (parts, crossed):
            result = gather(outputs, target)
            assert type(result) is kind
            assert torch.equal(result.a, given.a)
            assert torch.equal(result.b, given.b)
