"""What forwards of well-known libraries do to their own modules: all ranks do it, and a step is none the worse."""

import pytest
import torch
from fakes.graphs import give_graphs, without_gpu
from fakes.nets import cpu
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from train.nets import RANKS, Constrained, Linear, Pair, batches, mse

from mgpu_core import TrainStep


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.5, momentum=0.9), lambda p: Adam(p, lr=0.1)])
def test_a_forward_that_puts_a_parameter_elsewhere(make, ranks):
    torch.manual_seed(0)
    pair = Pair(Constrained().double(), make, ranks)
    for x, y in batches(6, [12, 1, 7]):
        loss, wanted = pair.both(x, y)
        assert abs(loss - wanted) < 1e-9
        assert pair.far() < 1e-9
        weight = pair.net.first.weight
        assert weight.untyped_storage().nbytes() == weight.nbytes
    pair.step.check_replicas()
    assert pair.same_state()


@pytest.mark.parametrize("ranks", RANKS)
def test_it_is_put_back_where_the_step_fails(ranks):
    torch.manual_seed(0)
    pair = Pair(Constrained().double(), lambda p: SGD(p, lr=0.5), ranks)
    for i, (x, y) in enumerate(batches(6, 8)):
        pair.net.fails = i == 3
        for call in (pair.step, pair.step.evaluate) if i == 3 else ():
            with pytest.raises(ValueError, match="as asked"):
                call(x, y)
        pair.net.fails = False
        if i == 3:
            weight = pair.net.first.weight
            assert weight.untyped_storage().nbytes() == weight.nbytes
        pair.both(x, y)
        assert pair.far() < 1e-9
        pair.step.evaluate(x, y)


@pytest.mark.parametrize("other", [torch.ones(1, 1), torch.ones(1, dtype=torch.float64)])
def test_one_of_another_shape(other):
    class Growing(Linear):
        def __init__(self):
            super().__init__()
            self.scale, self.grows = nn.Parameter(torch.ones(1)), False

        def forward(self, x):
            if self.grows:
                self.scale.data = other
            return super().forward(x) * self.scale

    net = Growing()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(2))
    batch = torch.ones(4, 3), torch.ones(4, 2)
    step(*batch)
    net.grows = True
    with pytest.raises(
        RuntimeError, match=r"the forward gives parameter scale another shape or dtype.*step\.rebuild\(\)"
    ):
        step(*batch)
    with pytest.raises(RuntimeError, match=r"parameter scale was moved"):
        step(*batch)
    assert step.steps == 1


def test_such_a_step_is_no_graph(monkeypatch):
    give_graphs(monkeypatch, "cpu")
    torch.manual_seed(0)
    pair = Pair(Constrained().double(), lambda p: SGD(p, lr=0.5), 2, capture=True, error_if_nonfinite=False)
    without_gpu(pair.step)
    with pytest.warns(UserWarning, match="not captured: recording it failed .*gives a parameter other memory"):
        distances = [pair.both(x, y) and pair.far() for x, y in batches(8, 8)]
    assert max(distances) < 1e-9
    assert pair.step.graphs.replays == 0


class Collecting(Linear):
    """Hooks its layers in the first forward that wants their outputs, as transformers' models do."""

    def __init__(self, at=0):
        super().__init__()
        self.calls, self.at, self.is_hooked, self.found = 0, at, False, []

    def forward(self, x):
        if self.calls >= self.at and not self.is_hooked:
            self.is_hooked = True

            def keep(module, args, output):
                self.found.append(output)

            self.last.register_forward_hook(keep)
        self.calls += 1
        self.found.clear()
        output = super().forward(x)
        return output + (self.found[0] if self.found else 0)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_forward_that_hooks_its_own_layers(ranks, at):
    torch.manual_seed(0)
    pair = Pair(Collecting(at).double(), lambda p: AdamW(p, lr=0.1), ranks)
    for x, y in batches(5, 8, columns=3):
        pair.both(x, y)
        assert pair.far() < 1e-9
    for _ in range(2):
        pair.step.evaluate(x, y)


@pytest.mark.parametrize("hook", [lambda *_: None, print])
def test_hooks_of_the_users_own_are_told_from_those(hook):
    net = Collecting()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    step(x, y)
    step(x, y)
    net.last.register_forward_hook(hook)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="module last has got or lost a hook"):
            step(x, y)
    assert step.steps == 2


def test_another_hook_of_the_same_code():
    """The other ranks would go on with the old one."""

    def adds(number):
        return lambda module, args, output: output + number

    net = Linear()
    handle = net.last.register_forward_hook(adds(1))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    step(x, y)
    handle.remove()
    net.last.register_forward_hook(adds(2))
    with pytest.raises(RuntimeError, match="module last has got or lost a hook"):
        step(x, y)


class Lazy(Linear):
    """Makes a buffer when it is first needed, as rotary embeddings and masks do."""

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((3,), 2.0, dtype=x.dtype), persistent=False)
        return super().forward(x * self.scale)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("how", ["whole", "few rows first", "alone first"])
def test_buffers_that_a_forward_makes(ranks, how):
    torch.manual_seed(0)
    pair = Pair(Lazy().double(), lambda p: SGD(p, lr=0.1), ranks)
    if how == "alone first":
        pair.net(torch.ones(2, 3, dtype=torch.float64))
    for x, y in batches(4, [1 if how == "few rows first" else 16, 16], columns=3):
        pair.both(x, y)
        assert pair.far() < 1e-9
    assert "scale" not in pair.net.state_dict()
    for module in pair.step._engine.parts.replicas.modules:
        assert "scale" not in module.state_dict()


def test_buffers_that_come_and_go_between_steps():
    seen = []

    class Reads(Linear):
        def forward(self, x):
            seen.append(sorted(self._buffers))
            return super().forward(x) * getattr(self, "late", torch.ones(1))

    net = Reads()
    net.late = None  # an attribute first
    del net.late
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(3))
    x, y = torch.ones(6, 3), torch.ones(6, 2)
    for change, wanted in (
        (lambda: None, []),
        (lambda: net.register_buffer("late", torch.ones(1)), ["late"]),
        (lambda: net.register_buffer("other", None), ["late", "other"]),
        (lambda: delattr(net, "late"), ["other"]),
        (lambda: delattr(net, "other"), []),
    ):
        change()
        seen.clear()
        step(x, y)
        assert seen == [wanted] * 3


class Wrapper(Optimizer):
    """As accelerate's and timm's Lookahead: an optimizer without what torch's constructor makes."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.parametrize("ranks", RANKS)
def test_an_optimizer_around_another_one(ranks):
    torch.manual_seed(0)
    pair = Pair(Linear().double(), lambda p: Wrapper(Adam(p, lr=0.1)), ranks)
    for x, y in batches(4, 8, columns=3):
        pair.both(x, y)
        assert pair.far() < 1e-9
    assert pair.same_state()


def test_each_parameter_has_a_storage_of_its_own():
    """Savers such as safetensors' know tensors by their storage: of those that share one they write the first."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(12, 2))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    step(torch.ones(4, 2, 4, 4), torch.ones(4, 2))
    storages = [each.untyped_storage() for each in net.parameters()]
    assert len({each.data_ptr() for each in storages}) == len(storages)
    assert [each.nbytes() for each in storages] == [each.nbytes for each in net.parameters()]
    flat = step._engine.parts.sync.layout.flats[0].values[0]
    begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
    assert all(begin <= each.data_ptr() < end for each in storages)
    weight = net[0].weight.detach()
    expected = weight.clone()
    del step, flat, net, storages
    assert torch.equal(weight, expected)  # the whole lives for as long as a part of it
