"""What forwards of well-known libraries do to their own modules: all ranks do it, and a step is none the worse."""

from types import SimpleNamespace

import pytest
import torch
from fakes.graphs import give_graphs, without_gpu
from fakes.nets import cpu
from step.nets import Constrained, Linear, Pair, batches, mse
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from mgpu_core import TrainStep, optim
from mgpu_core.step.forward_backward import any_has_graph
from mgpu_core.trace import tracer
from mgpu_core.trace.events import Span


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
    with pytest.raises(RuntimeError, match=r"scale was given another shape, dtype or device.*step\.rebuild\(\)"):
        step(*batch)
    assert step.steps == 1
    net.grows = False
    net.scale.data = torch.ones(1)
    step(*batch)
    assert step.steps == 2


def test_such_a_step_is_no_graph(monkeypatch):
    give_graphs(monkeypatch, "cpu")
    torch.manual_seed(0)
    pair = Pair(Constrained().double(), lambda p: optim.SGD(p, lr=0.5), 2, capture=True, error_if_nonfinite=False)
    without_gpu(pair.step)
    with pytest.warns(UserWarning, match="not captured: recording it failed .*gives a parameter other memory"):
        distances = [pair.both(x, y) and pair.far() for x, y in batches(8, 8)]
    assert max(distances) < 1e-9
    assert pair.step.graphs.replays == 0


class Lazy(Linear):
    """Makes a buffer when it is first needed, as rotary embeddings and masks do."""

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((3,), 2.0, dtype=x.dtype), persistent=False)
        return super().forward(x * self.scale)


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


class Wrapper(Optimizer):
    """As accelerate's and timm's Lookahead: an optimizer without what torch's constructor makes."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        self.inner.step()


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
    addresses = sorted(each.data_ptr() for each in storages)
    assert addresses[-1] - addresses[0] < 2048, "parts of one whole, aligned to 512 bytes"
    weight = net[0].weight.detach()
    expected = weight.clone()
    del step, net, storages
    assert torch.equal(weight, expected)  # the whole lives for as long as a part of it


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("nested", [lambda x: ((x,), {}), lambda x: (([x],), {}), lambda x: ((), {"x": x})])
def test_inputs_of_a_graph_are_found_in_any_nest(nested, wants):
    inputs, kwargs = nested(torch.ones(2, requires_grad=wants))
    assert (
        any_has_graph([SimpleNamespace(inputs=(), kwargs={}), SimpleNamespace(inputs=inputs, kwargs=kwargs)]) == wants
    )


def test_a_trace_names_the_optimizers_kernel():
    net = Linear()
    step = TrainStep(net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(2))
    with tracer.tracing() as buffer:
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert [each.step for each in buffer.events if isinstance(each, Span) and "sgd" in each.step] == ["sgd"]
