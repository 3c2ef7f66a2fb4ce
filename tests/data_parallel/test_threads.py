"""Threads: what the caller sets reaches the ranks, errors come back, wrappers and checkpoints may be nested."""

import contextvars
import copy
import threading

import pytest
import torch
from fakes.nets import Polynomial, chunks, cpu, mlp, whole
from fakes.tensors import numbers
from fakes.wrapper import Lambda, agree, equal_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_core import DataParallel

variable = contextvars.ContextVar("variable", default=None)


def test_grad_mode_inference_mode_and_contextvars_reach_the_ranks(ranks):
    seen = []

    def note(self, x):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), variable.get()))
        return self.linear(x)

    wrapper = DataParallel(Lambda(note), cpu(ranks))
    token = variable.set("mine")
    try:
        for mode, wanted in (
            (torch.enable_grad(), (True, False, "mine")),
            (torch.no_grad(), (False, False, "mine")),
            (torch.inference_mode(), (False, True, "mine")),
        ):
            seen.clear()
            with mode:
                out = wrapper(numbers(8, 2))
            assert seen == [wanted] * ranks
            assert out.requires_grad == wanted[0]
            assert out.is_inference() == wanted[1]
    finally:
        variable.reset(token)


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_the_ranks(ranks, dtype):
    net = whole(nn.Linear(3, 2))
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 3)
    with torch.autocast("cpu", dtype=dtype):
        out = wrapper(x)
        assert out.dtype is dtype
        assert torch.equal(out, net(x))
    out.sum().backward()
    assert net.weight.grad.dtype is torch.float32
    assert torch.equal(net.weight.grad, x.sum(0).expand(2, 3))
    assert wrapper(x).dtype is torch.float32


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
@pytest.mark.several_ranks
def test_failure_in_a_replica_has_type_text_cause_and_notes(ranks):
    def fail(self, x):
        if x[0, 0] > 0:
            raise KeyError("the key")
        return self.linear(x)

    x = torch.ones(ranks, 2)
    x[0] = 0
    with pytest.raises(KeyError) as caught:
        DataParallel(Lambda(fail), cpu(ranks))(x)
    text = str(caught.value)
    assert text.startswith("Caught KeyError in replica 1 on device cpu.\nOriginal Traceback (most recent call last):\n")
    assert "KeyError: 'the key'" in text
    assert caught.value.__cause__.args == ("the key",)
    notes = [f"also in replica {rank} on device cpu: KeyError('the key')" for rank in range(2, ranks)]
    assert getattr(caught.value, "__notes__", []) == notes


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_through(ranks, kind):
    original = kind("stop")

    def stop(self, x):
        raise original

    wrapper = DataParallel(Lambda(stop), cpu(ranks))
    with pytest.raises(kind) as caught:
        wrapper(torch.ones(8, 2))
    assert caught.value is original
    wrapper.module.function = lambda self, x: self.linear(x)
    assert wrapper(torch.ones(8, 2)).shape == (8, 2)


def test_failure_in_backward_leaves_everything_usable(ranks):
    net = mlp().double()
    wrapper = DataParallel(net, cpu(ranks))
    handle = net[2].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrapper(numbers(8, 4).double()).sum().backward()
    handle.remove()
    net.zero_grad()
    agree(net, ranks, numbers(8, 4).double())


def test_one_devices_failure_is_not_dressed_up(ranks):
    wrapper = DataParallel(Lambda(lambda self: {}["x"]), cpu(ranks))
    with pytest.raises(KeyError) as caught:
        wrapper()
    assert ("Caught KeyError in replica 0" in str(caught.value)) == (ranks > 1)


@pytest.mark.cpu_only("a wrapper in a wrapper names the first device of the outer one, whose other ranks are elsewhere")
@pytest.mark.parametrize("inner", [1, 2, 3])
@pytest.mark.parametrize("outer", [1, 2, 3])
def test_data_parallel_inside_data_parallel(outer, inner):
    plain = Polynomial()
    net = copy.deepcopy(plain)
    threads = []
    net.register_forward_hook(lambda *_: threads.append(threading.get_ident()))
    wrapper = DataParallel(nn.Sequential(DataParallel(net, cpu(inner)), nn.ReLU()), cpu(outer))
    x = numbers(9, 3)
    for _ in range(2):
        threads.clear()
        out = wrapper(x)
        assert torch.equal(out, torch.relu(plain(x)))
        assert len(threads) == inner * outer
    out.sum().backward()
    torch.relu(plain(x)).sum().backward()
    equal_gradients(net, plain)


def test_one_wrapper_from_eight_threads(ranks):
    net = Polynomial()
    wrapper = DataParallel(net, cpu(ranks))
    barrier = threading.Barrier(8, timeout=20)
    found = {}

    def work(number):
        x = numbers(8, 3) + number
        barrier.wait()
        out = wrapper(x)
        found[number] = (out.detach(), torch.autograd.grad(out.sum(), list(net.parameters())))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert sorted(found) == list(range(8))
    for number, (out, grads) in found.items():
        wanted = net(numbers(8, 3) + number)
        assert torch.equal(out, wanted)
        for one, other in zip(grads, torch.autograd.grad(wanted.sum(), list(net.parameters())), strict=True):
            assert torch.equal(one, other)


def test_forward_and_backward_inside_a_backward_hook(ranks):
    net = Polynomial()
    wrapper = DataParallel(net, cpu(ranks))
    inner = []
    x = numbers(8, 3)

    def again(grad):
        if not inner:
            with torch.enable_grad():
                out = wrapper(x)
                inner.append((out.detach(), torch.autograd.grad(out.sum(), net.last.bias)[0]))

    net.first.weight.register_hook(again)
    wrapper(x).sum().backward()
    assert torch.equal(inner[0][0], net(x))
    assert inner[0][1].tolist() == [8, 8]


@pytest.mark.several_ranks
def test_backward_inside_the_forward_of_every_rank(ranks):
    def inner(self, x):
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(self.linear(x).pow(2).sum(), self.linear.weight)
        return grad.sum().expand(len(x)).clone()

    net = Lambda(inner)
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x)
    assert torch.equal(out, torch.cat([net(part) for part in x.split(chunks(8, ranks))]))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant, self.runs = mlp().double(), reentrant, []

    def forward(self, x):
        self.runs.append(len(x))
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
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
    """Runs a method that it keeps in an attribute again in backward, when the forward's replicas are gone."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant, self.run = Polynomial(), reentrant, self.own

    def own(self, x):
        return self.inner(x)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_of_a_bound_method_in_an_attribute(ranks, reentrant):
    net, plain = CheckpointedMethod(reentrant), Polynomial()
    x = numbers(8, 3)
    DataParallel(net, cpu(ranks))(x.clone().requires_grad_()).sum().backward()
    plain(x).sum().backward()
    equal_gradients(net.inner, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_outside(ranks, reentrant):
    plain = mlp().double()
    net = copy.deepcopy(plain)
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    checkpoint(DataParallel(net, cpu(ranks)), x, use_reentrant=reentrant).pow(2).sum().backward()
    plain(y).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    equal_gradients(net, plain)
