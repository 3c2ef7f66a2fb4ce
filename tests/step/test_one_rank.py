"""A step of one rank, whose gradients stay where autograd makes them: a plain loop of torch's, with its own numbers."""

import copy

import pytest
import torch
from fakes.nets import cpu
from step.nets import Branches, Complex, TwoDtypes, mse
from torch import nn

from mgpu_core import TrainStep, optim

F64 = torch.float64


class Dense(nn.Module):
    """One layer is never used."""

    def __init__(self):
        super().__init__()
        self.net = Branches().double()

    def forward(self, x):
        return self.net(x, 2)


class Sparse(nn.Module):
    """The rows of a table that the signs of the inputs choose."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(6, 3, sparse=True).double(), nn.Linear(3, 2).double()

    def forward(self, x):
        return self.last(self.table((x > 0).sum(1)))


class OtherLayouts(nn.Module):
    """A parameter that is transposed, and one with gaps in its memory."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 4, dtype=F64).T)
        self.last = nn.Parameter(torch.randn(5, 4, dtype=F64)[:, ::2])

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.last


DENSE = {"dense": Dense, "two dtypes": TwoDtypes, "other layouts": OtherLayouts}
NETS = DENSE | {"complex": Complex, "sparse": Sparse}
OPTIMIZERS = {
    "torch": (torch.optim.SGD, NETS),
    "ours": (optim.SGD, DENSE),
}
CASES = [(name, net) for name, (_, nets) in OPTIMIZERS.items() for net in nets]


def data(seed, rows=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator, dtype=F64), torch.randn(rows, 2, generator=generator, dtype=F64)


def made(make, net, **settings):
    """A step, and the same net with torch's optimizer of the same name."""
    torch.manual_seed(0)
    mine = NETS[net]()
    alone = copy.deepcopy(mine)
    step = TrainStep(mine, mse, OPTIMIZERS[make][0](mine.parameters(), lr=0.1), cpu(1), **settings)
    return step, alone, torch.optim.SGD(alone.parameters(), lr=0.1)


def gradients_of(net):
    found = [each.grad for each in net.parameters()]
    return [each.to_dense() if each is not None and each.is_sparse else each for each in found]


def check(step, alone):
    """Values, and torch's gradients; those of ours are multiplied in the kernel, and stay as they were."""
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if isinstance(alone, TwoDtypes) else {"rtol": 1e-12, "atol": 1e-12}
    for mine, theirs in zip(step.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    for mine, theirs in zip(gradients_of(step.module), gradients_of(alone), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and type(step.optimizer) is torch.optim.SGD:
            torch.testing.assert_close(mine, theirs, **tolerance)


def clip(net, limit):
    """As torch's function, which refuses sparse gradients."""
    parts = [each.abs().double().flatten() for each in gradients_of(net) if each is not None]
    factor = min(1.0, limit / (float(torch.cat(parts).norm()) + 1e-6))
    for each in net.parameters():
        if each.grad is not None:
            each.grad.mul_(factor)
    return factor


@pytest.mark.parametrize(("make", "net"), CASES)
@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_clip_norm(make, net, limit):
    step, alone, reference = made(make, net, clip_norm=limit)
    for seed in range(4):
        x, y = data(seed)
        loss = step(x, y)
        reference.zero_grad()
        wanted = mse(alone(x), y)
        wanted.backward()
        factor = clip(alone, limit)
        assert (factor < 1) is (limit < 1)
        reference.step()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0.0)
        check(step, alone)


@pytest.mark.parametrize(("make", "net"), CASES)
def test_accumulated_calls(make, net):
    step, alone, reference = made(make, net, accumulate=2)
    for seed in range(3):
        batches = data(2 * seed, rows=5), data(2 * seed + 1, rows=3)
        reference.zero_grad()
        for x, y in batches:
            step(x, y)
            assert step.steps == seed + (y.shape[0] == 3)
        mse(alone(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).backward()
        reference.step()
        check(step, alone)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize(("make", "net"), CASES)
def test_gradients_stay_where_autograd_made_them(make, net, settings):
    step, *_ = made(make, net, **settings)
    seen = {}
    for i, each in enumerate(step.module.parameters()):
        each.register_post_accumulate_grad_hook(lambda each, i=i: seen.__setitem__(i, each.grad))
    for turn in range(3):
        seen.clear()
        while step.steps == turn:
            step(*data(turn))
        assert len(seen) == sum(1 for name, _ in step.module.named_parameters() if "rare" not in name)
        for i, each in enumerate(step.module.parameters()):
            assert each.grad is seen.get(i)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1.0}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize(("make", "net"), CASES)
def test_a_gradient_that_is_not_finite_is_named(make, net, settings):
    step, *_ = made(make, net, **settings)
    *_, (name, last) = step.module.named_parameters()
    before = [each.detach().clone() for each in step.module.parameters()]
    handle = last.register_hook(lambda gradient: gradient * float("inf"))
    for _ in range(step.accumulate - 1):
        step(*data(0))
    with pytest.raises(FloatingPointError, match=rf"the gradient of {name} is not finite on rank 0 \(device cpu\)"):
        step(*data(0))
    assert step.steps == 0
    assert all(each.grad is None for each in step.module.parameters())
    assert all(torch.equal(one, each) for one, each in zip(before, step.module.parameters(), strict=True))
    handle.remove()
    while step.steps == 0:
        step(*data(0))


@pytest.mark.parametrize(("make", "net"), CASES)
def test_float16_skips_what_overflows_and_then_trains(make, net):
    step, alone, reference = made(make, net, amp_dtype=torch.float16)
    before = [each.detach().clone() for each in step.module.parameters()]
    largest = next(step.module.parameters())
    handle = largest.register_hook(lambda gradient: gradient * float("nan"))
    for _ in range(2):
        step(*data(0))
    handle.remove()
    assert (step.steps, step.loss_scale.skipped) == (0, 2)
    assert all(torch.equal(one, each) for one, each in zip(before, step.module.parameters(), strict=True))
    assert all(each.grad is None for each in step.module.parameters())
    for seed in range(3):
        x, y = data(seed)
        while step.steps == seed:
            step(x, y)
        reference.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = mse(alone(x), y)
        loss.backward()
        reference.step()
    for mine, theirs in zip(step.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("make", [torch.optim.AdamW, optim.AdamW])
def test_parameters_that_the_update_leaves_out(make):
    """They are frozen, not the optimizer's, or have no gradient."""
    torch.manual_seed(0)
    net = Branches().double()
    alone = copy.deepcopy(net)
    own, reference = (
        kind([*of.first.parameters(), *of.last.parameters()], lr=0.1)
        for kind, of in ((make, net), (torch.optim.AdamW, alone))
    )
    step = TrainStep(net, mse, own, cpu(1))
    for seed in range(6):
        (x, y), way = data(seed), 1 if seed == 2 else 2
        for of in (net, alone):
            of.first.requires_grad_(seed % 3 != 1)
        step(x, way, y)
        alone.zero_grad()
        mse(alone(x, way), y).backward()
        reference.step()
        for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
            assert (mine.grad is None) == (theirs.grad is None)
    assert net.second.weight.grad is not None
    assert net.rare.weight.grad is None
