"""Hooks on parameters are called once per call, on the sum over all ranks, as one device would call them."""

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mgpu_core import Pipeline, TrainStep, optim

HOOKS = {
    "clamp": lambda grad: grad.clamp(-0.05, 0.05),
    "sign": lambda grad: grad.sign() * 0.1,
    "norm": lambda grad: grad / grad.norm().clamp(min=1e-3),
    "nothing": lambda grad: None,
    "noise": lambda grad: grad + 0.01,
}
OPTIMIZERS = {"torch's": torch.optim.SGD, "ours": optim.SGD}


def net_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double().to(cpu(1)[0])


def batches(count=4, ignored=0):
    generator = torch.Generator("cpu").manual_seed(1)
    found = []
    for _ in range(count):
        x = torch.randn(9, 3, generator=generator, dtype=torch.float64, device="cpu")
        y = torch.randint(0, 4, (9,), generator=generator, device="cpu")
        y[:ignored] = -100
        found.append((x.to(cpu(1)[0]), y.to(cpu(1)[0])))
    return found


def hooked(net, hook, seen):
    def called(grad):
        seen.append(grad.detach().clone())
        return hook(grad)

    net[0].weight.register_hook(called)
    net[2].bias.register_hook(hook)
    return net


def alone(hook, data, accumulate=1, clip=None):
    seen = []
    net = hooked(net_of(), hook, seen)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    for index, (x, y) in enumerate(data):
        if index % accumulate == 0:
            optimizer.zero_grad()
        (F.cross_entropy(net(x), y) / accumulate).backward()
        if index % accumulate == accumulate - 1:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return net, seen


def assert_same(net, other):
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one.detach().cpu(), two.detach().cpu(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_hook_that_comes_between_two_calls_of_a_window(kind):
    """The gradients of the calls before, of all ranks, count as they are."""
    net, other = net_of(), net_of()
    step = TrainStep(net, F.cross_entropy, OPTIMIZERS[kind](net.parameters(), lr=0.3), cpu(3), accumulate=2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    for index, (x, y) in enumerate(batches(6)):
        if index == 3:
            for each in (net, other):
                each[0].weight.register_hook(lambda grad: grad * 2)
        step(x, y)
        (F.cross_entropy(other(x), y) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(net, other)


def test_a_checkpoint_that_makes_gradients_twice_is_not_summed_before_the_hook():
    """One gradient more than there are leaves, in a bucket whose gradients are counted."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared, self.last = nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            for _ in range(2):
                x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
            return self.last(x)

    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Twice().double().to(cpu(1)[0]))
        nets[-1].shared.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    net, other = nets
    step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.3), cpu(3), bucket_nbytes=1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    for x, y in batches():
        step(x, y)
        optimizer.zero_grad()
        # A reentrant checkpoint calls the hook on each of its two gradients, which a step sees as one sum.
        hooks, other.shared.weight._backward_hooks = other.shared.weight._backward_hooks, None
        F.cross_entropy(other(x), y).backward()
        other.shared.weight._backward_hooks = hooks
        other.shared.weight.grad.clamp_(-0.01, 0.01)
        optimizer.step()
        assert_same(net, other)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_a_hook_sees_the_sum_over_the_ranks(name, kind, workers, ranks):
    seen = []
    net = hooked(net_of(), HOOKS[name], seen)
    optimizer = OPTIMIZERS[kind](net.parameters(), lr=0.3, momentum=0.9)
    step = TrainStep(net, F.cross_entropy, optimizer, cpu(ranks), workers=workers)
    for x, y in batches():
        step(x, y)
    other, wanted = alone(HOOKS[name], batches())
    assert len(seen) == len(wanted) == 4
    assert all(torch.allclose(one.cpu(), two.cpu(), rtol=1e-9) for one, two in zip(seen, wanted, strict=True))
    assert_same(net, other)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"clip_norm": 0.1}, {"bucket_nbytes": 64}])
def test_before_accumulation_and_clipping_and_in_many_buckets(settings, ranks):
    seen = []
    net = hooked(net_of(), HOOKS["clamp"], seen)
    step = TrainStep(
        net, F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), cpu(ranks), **settings
    )
    for x, y in batches():
        step(x, y)
    other, wanted = alone(HOOKS["clamp"], batches(), settings.get("accumulate", 1), settings.get("clip_norm"))
    assert len(seen) == len(wanted) == 4
    assert_same(net, other)


@pytest.mark.several_ranks
def test_a_mean_over_labels_is_the_gradient_that_the_hook_sees(ranks):
    seen = []
    net = hooked(net_of(), HOOKS["clamp"], seen)
    step = TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), cpu(ranks))
    for x, y in batches(ignored=5):
        step(x, y)
    other, wanted = alone(HOOKS["clamp"], batches(ignored=5))
    assert all(torch.allclose(one.cpu(), two.cpu(), rtol=1e-9) for one, two in zip(seen, wanted, strict=True))
    assert_same(net, other)


def test_in_a_step_over_a_pipeline_once_per_call():
    seen = []
    net = hooked(net_of(), HOOKS["clamp"], seen)
    pipeline = Pipeline(net, cpu(2), split_points=["2"], chunks=3)
    step = TrainStep(pipeline, F.cross_entropy, torch.optim.SGD(pipeline.parameters(), lr=0.3, momentum=0.9))
    for x, y in batches():
        step(x, y)
    other, wanted = alone(HOOKS["clamp"], batches())
    assert len(seen) == len(wanted) == 4
    assert_same(net, other)


def test_hooks_that_come_and_go_are_followed(ranks):
    """And a backward of the user's own, between two steps, calls them as ever."""
    net, calls = net_of(), []
    step = TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.3), cpu(ranks))
    (x, y), *_ = batches()
    step(x, y)
    handle = net[0].weight.register_hook(lambda grad: calls.append("step"))
    step(x, y)
    step(x, y)
    assert calls == ["step"] * 2
    F.cross_entropy(net(x), y).backward()
    assert calls == ["step"] * 3
    handle.remove()
    step(x, y)
    assert calls == ["step"] * 3


def test_a_hook_that_fails_leaves_the_step_usable(ranks):
    net, fails = net_of(), [True]

    def hook(grad):
        if fails:
            raise ValueError("not this one")

    net[0].weight.register_hook(hook)
    step = TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.3), cpu(ranks))
    before = net[0].weight.detach().clone()
    (x, y), *_ = batches()
    with pytest.raises(ValueError, match="not this one"):
        step(x, y)
    assert torch.equal(net[0].weight, before)
    assert len(net[0].weight._backward_hooks) == 1
    fails.clear()
    step(x, y)
    assert step.steps == 1


def test_sparse_gradients_too(ranks):
    torch.manual_seed(0)
    nets = [nn.Embedding(6, 4, sparse=True).double().to(cpu(1)[0]) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        net.weight.register_hook(lambda grad: grad * 2)
    tokens = torch.arange(6, device=cpu(1)[0])
    plain = torch.optim.SGD(nets[1].parameters(), lr=0.3)
    F.cross_entropy(nets[1](tokens), tokens % 4).backward()
    plain.step()
    TrainStep(nets[0], F.cross_entropy, torch.optim.SGD(nets[0].parameters(), lr=0.3), cpu(ranks))(tokens, tokens % 4)
    assert_same(*nets)


@pytest.mark.several_ranks
def test_a_parameter_that_no_rank_uses_calls_no_hook(ranks):
    net, calls = net_of(), []
    net.unused = nn.Parameter(torch.ones(1, dtype=torch.float64, device=cpu(1)[0]))
    net.unused.register_hook(calls.append)
    step = TrainStep(net, lambda out, y: F.cross_entropy(out, y), torch.optim.SGD(net.parameters(), lr=0.3), cpu(ranks))
    step(*batches()[0])
    assert calls == []
    assert net.unused.grad is None
