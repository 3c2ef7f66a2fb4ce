"""Hooks run once per rank, on parameters once with the sum, and those of a rank stay with it."""

import gc
import time
import warnings
import weakref
from contextvars import ContextVar

import pytest
import torch
from fakes.nets import Polynomial, cpu, mlp, whole
from fakes.tensors import numbers
from torch import nn

from mgpu_core import DataParallel, TrainStep


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


def trained(net, ranks, workers, **options):
    """The parameters after three steps of a net whose loss is its mean output."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    step = TrainStep(net, lambda out, _: out.mean(), optimizer, cpu(ranks), workers=workers, **options)
    x = numbers(6, 2).double()
    for _ in range(3):
        step(x, x)
    return [each.detach().clone() for each in net.parameters()]


class Taking(nn.Module):
    """Adds an activation that a hook takes, registered for the length of the call; the activations are wide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x):
        taken = []
        handle = self.inner.register_forward_hook(lambda module, args, out: taken.append(out))
        time.sleep(0.002)
        out = self.last(self.inner(x))
        handle.remove()
        assert [len(each) for each in taken] == [len(x)]
        return out * taken[0].mean(1, keepdim=True)


@pytest.mark.several_ranks
@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.parametrize("static_graph", [False, True])
def test_a_hook_of_a_forward_is_its_ranks_in_a_step(ranks, workers, static_graph):
    """Rank 0 runs the module itself, whose tables the other ranks do not share."""
    net = Taking().double().to(cpu(1)[0])
    found = trained(net, ranks, workers, static_graph=static_graph)
    wanted = trained(Taking().double().to(cpu(1)[0]), 1, "caller")
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found, wanted, strict=True))
    assert not net.inner._forward_hooks


class Installing(nn.Module):
    """Installs hooks on its layers in its first call, and notes that, as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.is_installed = False

    def forward(self, x):
        if not self.is_installed:
            for layer in self.layers:
                layer.register_forward_hook(take)
            self.is_installed = True
        token = TAKEN.set([])
        for layer in self.layers:
            x = layer(x)
        taken = TAKEN.get()
        TAKEN.reset(token)
        assert len(taken) == 3
        return sum(taken)


TAKEN = ContextVar("taken")


def take(module, args, out):
    TAKEN.get().append(out)


@pytest.mark.several_ranks
@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_what_a_first_call_installs_on_layers_is_installed_once(ranks, workers):
    net = Installing().double().to(cpu(1)[0])
    for _ in range(3):
        trained(net, ranks, workers)
        assert [len(each._forward_hooks) for each in net.layers] == [1, 1, 1]
    assert net.is_installed


class Noting(nn.Module):
    """Notes once what its forward has done; nothing else is assigned."""

    def __init__(self):
        super().__init__()
        self.inner, self.is_ready = nn.Linear(2, 2), False

    def forward(self, x):
        self.is_ready = True
        return self.inner(x)


@pytest.mark.several_ranks
def test_a_note_that_all_ranks_make_is_kept_as_on_one_device(ranks):
    net = Noting().to(cpu(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(net.double(), ranks, "threads")
    assert net.is_ready


class Bound(nn.Module):
    """Keeps an activation by a hook that was registered when the module was made."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        for layer in (self.inner, self.last):
            layer.register_forward_hook(HOOKS[how](self))

    def keep(self, module, args, out):
        self.kept = out

    def forward(self, x):
        out = self.inner(x)
        time.sleep(0.002)
        return self.last(out) * self.kept


class Keeper:
    """An object that holds the module."""

    def __init__(self, module):
        self.module = module

    def __call__(self, module, args, out):
        self.module.kept = out


HOOKS = {
    "method": lambda net: net.keep,
    "closure": lambda net: lambda module, args, out: setattr(net, "kept", out),
    "object": Keeper,
}


@pytest.mark.several_ranks
@pytest.mark.parametrize("how", ["method", "closure"])
@pytest.mark.parametrize("plain_first", [False, True])
@pytest.mark.filterwarnings("ignore:the forward of Bound assigns")
def test_a_hook_that_is_bound_to_the_module_means_the_replicas(how, plain_first, ranks):
    x, plain = numbers(3 * ranks, 2), Bound(how).to(cpu(1)[0])
    plain(x).sum().backward()
    net = Bound(how).to(cpu(1)[0])
    if plain_first:
        net(x + 1)
    model = DataParallel(net, cpu(ranks))
    for _ in range(2):
        net.zero_grad()
        out = model(x)
        assert torch.equal(out, plain(x))
        out.sum().backward()
        assert torch.allclose(net.inner.weight.grad, plain.inner.weight.grad)
    wanted = trained(Bound(how).double().to(cpu(1)[0]), 1, "caller")
    for workers in ("threads", "caller"):
        found = trained(Bound(how).double().to(cpu(1)[0]), ranks, workers)
        assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found, wanted, strict=True))


@pytest.mark.several_ranks
@pytest.mark.parametrize("how", ["method", "closure"])
@pytest.mark.filterwarnings("ignore:the forward of Bound assigns")
def test_replicas_with_hooks_are_freed_with_their_graph(how, ranks):
    model, seen = DataParallel(Bound(how).to(cpu(1)[0]), cpu(ranks)), []
    model.module.inner.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(module)))
    gc.collect()
    gc.disable()
    try:
        model(numbers(3 * ranks, 2)).sum().backward()
        assert len(seen) == ranks
        assert [each() for each in seen] == [None] * ranks
    finally:
        gc.enable()


@pytest.mark.several_ranks
def test_a_hook_that_reaches_the_module_by_an_object_is_told_of(ranks):
    net, x = Bound("object").to(cpu(1)[0]), numbers(3 * ranks, 2)
    net(x)
    with pytest.warns(UserWarning, match="a hook on inner of Bound reaches the module itself"):
        DataParallel(net, cpu(1) * ranks)(torch.cat([x] * ranks))  # what the module has kept fits the rows of a rank


@pytest.mark.several_ranks
def test_the_tables_of_a_replica_are_not_written(ranks):
    class Writing(nn.Module):
        def forward(self, x):
            self._forward_hooks[0] = print
            return x

    with pytest.raises(RuntimeError, match="register_forward_hook"):
        DataParallel(Writing().to(cpu(1)[0]), cpu(ranks))(numbers(ranks, 2))
