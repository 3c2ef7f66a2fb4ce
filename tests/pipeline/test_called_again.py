"""A layer that the forward calls again in a later stage, where its tensors are not; on the fake devices differ."""

from functools import partial

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn.utils import weight_norm

from mgpu_core import Pipeline, TrainStep, optim, place

FIRST = cpu(1)[0]


class Scaled(nn.Module):
    """Has a buffer, a tensor in an attribute, and one in a list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1, 8))
        self.shift, self.pair = torch.linspace(0, 1, 8, device=FIRST), [torch.ones(8, device=FIRST), "text"]

    def forward(self, x):
        return self.linear(x) * self.scale + self.shift * self.pair[0]


class Noted(nn.Module):
    """Notes its calls on itself."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class Held(nn.Module):
    """Reaches its layers by a list, a partial, and a method of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers, self.last, self.act = [self.first], partial(self.second), self.activated

    def activated(self, x):
        return torch.tanh(x) * self.first.bias

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return self.last(x)


class Listed(nn.Module):
    """Keeps a list of its own weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) / 2)
        self.weights = [self.weight]

    def forward(self, x):
        assert isinstance(self.weight, nn.Parameter)
        return x @ self.weights[0]


class Keeping(nn.Module):
    """Reads what its first call has kept in its second: a tensor of the batch, and a method."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept, self.method = nn.Linear(8, 8), None, None

    def through(self, x):
        return self.linear(x)

    def forward(self, x):
        y = self.linear(x) if self.method is None else self.method(x)
        y, self.kept = (y, y) if self.kept is None else (y + self.kept / 2, None)
        self.method = self.through
        return y


class Last(nn.Module):
    """Keeps its last output, which nobody reads."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), None

    def forward(self, x):
        self.last = self.linear(x)
        return self.last


def patched():
    """Return a layer whose forward was exchanged."""
    layer = nn.Linear(8, 8)
    before = layer.forward
    layer.forward = partial(lambda function, x: function(x) * 2, before)
    return layer


class Recurrent(nn.Module):
    """Keeps a flat list of its weights in torch's own code."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.lstm(x[:, None])[0][:, 0]


KINDS = {
    "held": Held,
    "listed": Listed,
    "keeping": Keeping,
    "last": Last,
    "patched": patched,
    "recurrent": Recurrent,
    "compiled": lambda: torch.compile(nn.Linear(8, 8), backend="eager"),
    "spectral": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "linear": lambda: nn.Linear(8, 8),
    "scaled": Scaled,
    "noted": Noted,
    "weight norm": lambda: weight_norm(nn.Linear(8, 8)),
    "several": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Flatten()
    ),
}


class Twice(nn.Module):
    """Calls its first layer once more at the end."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([KINDS.get(kind, kind)(), nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.layers[0](x)


def made(kind):
    torch.manual_seed(0)
    return Twice(kind).to(FIRST)


def batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 8, generator=generator, device="cpu").to(FIRST) for _ in range(2)]


def calls_of(net):
    return [each.calls for each in net.modules() if isinstance(each, Noted)]


def mse(y, target):
    return (y - target).pow(2).mean()


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_trains_it_as_one_device_does(kind, recompute):
    net, whole = made(kind), made(kind)
    pipeline = Pipeline(net, cpu(2), split_points=["layers.1"], chunks=2, checkpoint=recompute)
    steps = [
        TrainStep(each, mse, optim.SGD(each.parameters(), 0.1), None if each is pipeline else cpu(1))
        for each in (pipeline, whole)
    ]
    for _ in range(3):
        losses = [float(step(*batch())) for step in steps]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for own, other in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.cpu(), other.cpu(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_placed_net_answers_as_one_device_does(kind):
    net, whole = made(kind), made(kind)
    place(net, cpu(2), ["layers.1"])
    x, _ = batch()
    for _ in range(2):
        y, wanted = net(x), whole(x)
        torch.testing.assert_close(y.cpu(), wanted.cpu())
        grads = [
            torch.autograd.grad(each.sum(), list(module.parameters())) for each, module in ((y, net), (wanted, whole))
        ]
        for own, other in zip(*grads, strict=True):
            torch.testing.assert_close(own.cpu(), other.cpu(), rtol=1e-4, atol=1e-5)
    assert calls_of(net) == calls_of(whole)


class Counting(nn.Module):
    """Adds to a buffer in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total += 1
        return self.linear(x)


def test_a_buffer_that_is_written_away_from_home_is_told_of():
    net = made(Counting)
    pipeline = Pipeline(net, cpu(2), split_points=["layers.1"], chunks=1)
    x, _ = batch()
    if torch.device(FIRST).type == "cpu":  # one memory
        pipeline(x)
        assert float(net.layers[0].total) == 2
        return
    with pytest.warns(UserWarning, match="a Counting writes its buffers where it is called again"):
        pipeline(x)
    assert float(net.layers[0].total.cpu()) == 1


class Tied(nn.Module):
    """Has the weight of another stage, and changes itself as it runs."""

    def __init__(self, weight):
        super().__init__()
        self.linear, self.act, self.handle = nn.Linear(8, 8, bias=False), None, None
        self.linear.weight = weight
        self.inner = nn.Sequential(nn.Identity())
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = self.mean + 1
        if self.act is None:
            self.act = nn.Tanh()
            self.handle = self.inner.register_forward_hook(lambda module, args, output: output * 2)
        return self.linear(self.inner(self.act(x)) + self.mean)


@pytest.mark.parametrize("run", ["place", "pipeline"])
def test_a_layer_with_a_tied_weight_changes_at_home_as_on_one_device(run):
    def tied():
        torch.manual_seed(0)
        first = nn.Linear(8, 8)
        return nn.Sequential(first, nn.GELU(), Tied(first.weight)).to(FIRST)

    net, whole = tied(), tied()
    placed = place(net, cpu(2), ["2"]) if run == "place" else Pipeline(net, cpu(2), split_points=["2"], chunks=1)
    x, _ = batch()
    for _ in range(3):
        torch.testing.assert_close(placed(x).cpu(), whole(x).cpu())
    torch.testing.assert_close(net[2].mean.cpu(), whole[2].mean.cpu())
