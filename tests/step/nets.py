"""Nets for the tests of the step, and one device's loop to compare with."""

import copy
from types import SimpleNamespace

import torch
from fakes.nets import cpu, whole
from torch import nn
from torch.optim import SGD

from mgpu_core import TrainStep


def mse(output, target):
    return ((output - target) ** 2).mean()


class Linear(nn.Module):
    """One matrix of whole numbers: its gradients are whole numbers too."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 2)
        whole(self)

    def forward(self, x):
        return self.last(x)


class Branches(nn.Module):
    """Which layer is used says the batch: `way` 0 uses the first, 1 the second, 2 both, and `rare` is never used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.rare = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5)
        self.last = nn.Linear(5, 2)

    def forward(self, x, way):
        hidden = 0
        if way != 1:
            hidden = hidden + self.first(x)
        if way != 0:
            hidden = hidden + self.second(x)
        return self.last(torch.tanh(hidden))


class TwoDtypes(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 3).double(), nn.Linear(3, 2)

    def forward(self, x):
        return self.narrow(self.wide(x).float()).double()


class Complex(nn.Module):
    """Parameters of complex numbers, and of others."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(4, 5, dtype=torch.complex128)), nn.Linear(5, 2).double()

    def forward(self, x):
        return self.last((x.to(torch.complex128) @ self.weight).abs())


class Constrained(nn.Module):
    """A weight whose rows are shortened in each forward, and put elsewhere, as EEGNet's layers do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.fails = False

    def forward(self, x):
        self.first.weight.data = torch.renorm(self.first.weight.data, p=2, dim=0, maxnorm=0.3)
        if self.fails:
            raise ValueError("as asked")
        return self.last(self.first(x))


def compiled_root(net):
    return torch.compile(net, backend="eager")


def compiled_in_place(net):
    net.compile(backend="eager")
    return net


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2), nn.ReLU()).double()


class Explode(torch.autograd.Function):
    """Calls `act` in backward."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.act()
        return grad, None


class Pair:
    """Keeps the same net twice: once in a step over ranks, compiled if it is said how, once alone on one device."""

    def __init__(self, net, make_optimizer, ranks, loss_fn=mse, *, compiled=lambda net: net, **settings):
        self.alone = copy.deepcopy(net)
        self.net = net = compiled(net)
        self.loss_fn = loss_fn
        self.optimizer, self.reference = make_optimizer(net.parameters()), make_optimizer(self.alone.parameters())
        devices = cpu(ranks) if isinstance(ranks, int) else ranks
        self.step = TrainStep(net, loss_fn, self.optimizer, devices, **settings)

    def both(self, *inputs):
        """One step of each; the two losses."""
        *args, target = inputs
        self.reference.zero_grad()
        loss = self.loss_fn(self.alone(*args), target)
        loss.backward()
        self.reference.step()
        return self.step(*inputs), loss.detach()

    def far(self):
        """Return the largest difference between parameters."""
        pairs = zip(self.net.parameters(), self.alone.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)

    def same_gradients(self):
        """Return whether the gradients are equal, and missing for the same parameters."""
        for a, b in zip(self.net.parameters(), self.alone.parameters(), strict=True):
            if (a.grad is None) != (b.grad is None) or (a.grad is not None and not torch.allclose(a.grad, b.grad)):
                return False
        return True

    def same_state(self):
        mine, alone = (SimpleNamespace(net=n, optimizer=o) for n, o in self._sides())
        return same_state(mine, alone)

    def _sides(self):
        return (self.net, self.optimizer), (self.alone, self.reference)


def same_state(one, other):
    """Return whether the optimizers of two sides show the same state, of the same parameters of their nets."""
    shown, wanted = (
        [
            {kind: each for kind, each in side.optimizer.state.get(parameter, {}).items() if each is not None}
            for parameter in side.net.parameters()
        ]
        for side in (one, other)
    )
    return all(
        mine.keys() == theirs.keys() and all(_is_like(mine[kind], theirs[kind]) for kind in mine)
        for mine, theirs in zip(shown, wanted, strict=True)
    )


def _is_like(one, other):
    return torch.allclose(one, other) if torch.is_tensor(one) else one == other


def batches(steps, rows, columns=4, classes=2, seed=0, dtype=torch.float64):
    """(inputs, targets) of so many rows; a list of row counts is cycled through."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(steps):
        count = rows[i % len(rows)] if isinstance(rows, list | tuple) else rows
        yield (
            here(torch.randn(count, columns, generator=generator, dtype=dtype, device="cpu")),
            here(torch.randn(count, classes, generator=generator, dtype=dtype, device="cpu")),
        )


def here(tensor):
    """On the device where the tests run."""
    return tensor.to(torch.get_default_device())


def total(output, target):
    return ((output - target) * output.detach()).sum()


def rows(count, columns=3):
    return (torch.arange(count * columns).reshape(count, columns) % 7 - 3).float()


def sgd(p):
    return SGD(p, lr=0.25)


def plain_step(ranks, **settings):
    net = Linear()
    return net, TrainStep(net, total, sgd(net.parameters()), cpu(ranks), reduction="sum", **settings)


def state_of(step):
    values = {name: value.clone() for name, value in step.module.state_dict().items()}
    optimizer = copy.deepcopy(step.optimizer.state_dict())
    return values, optimizer, step.steps


def assert_same(one, other):
    assert one[2] == other[2]
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert one[1]["state"].keys() == other[1]["state"].keys()
    for index, state in one[1]["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[1]["state"][index][name])), name
