"""Replays of recorded steps are steps, on a recorder that has no GPU: what the host does around them."""

import copy
import gc
import warnings
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from fakes.graphs import OPTIMIZERS, OneWeight, give_graphs, pair, recorder_of, same, step_of, total, without_gpu
from fakes.nets import cpu
from step.nets import Linear, batches, mse
from torch import nn
from torch.optim.lr_scheduler import StepLR

from mgpu_core import TrainStep
from mgpu_core.optim import SGD
from mgpu_core.step.grad_clip import are_finite, overflow_of
from mgpu_core.step.graph_cache import WARM_UP


@pytest.fixture(autouse=True)
def the_cpu_has_graphs(monkeypatch):
    give_graphs(monkeypatch, "cpu")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_are_steps(name, ranks):
    """Rows that change, a scheduler, another way through the net: 60 steps, the same bits.

    Of one rank up to rounding: its ordinary steps add up the norm tensor by tensor, a graph over flat memory.
    """
    equal = torch.equal if ranks > 1 else partial(torch.allclose, rtol=0, atol=1e-12)
    captured, plain = pair(OPTIMIZERS[name], ranks, clip_norm=0.5)
    schedules = [StepLR(step.optimizer, 7, 0.5) for step in (captured, plain)]
    with warnings.catch_warnings(action="ignore"):
        for i, (x, y) in enumerate(batches(60, [12] * 9 + [7])):
            way = 2 if i < 40 else 0
            assert equal(captured(x, way, y), plain(x, way, y))
            for schedule in schedules:
                schedule.step()
            assert same(captured.module, plain.module, equal)
            assert [p.grad is None for p in captured.module.parameters()] == [
                p.grad is None for p in plain.module.parameters()
            ]
    assert captured.steps == plain.steps == 60
    assert captured.graphs.replays >= 40
    assert recorder_of(captured).records <= 4
    one, other = captured.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    for index, state in other.items():
        assert all(equal(one[index][key], value) for key, value in state.items())


def test_close_lets_go_of_the_graphs_and_their_memory(monkeypatch):
    net = Linear()
    step = step_of(net, SGD(net.parameters(), lr=0.1))
    recorder, gone = recorder_of(step), []

    def forget():
        gc.collect()
        gone.append(graph() is None)

    monkeypatch.setattr(recorder, "forget", forget)
    for _ in range(WARM_UP + 2):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    (graph,) = recorder.made
    step.close()
    assert gone == [True]


def test_the_first_of_a_kind_are_ordinary():
    net = Linear()
    step = step_of(net, SGD(net.parameters(), lr=0.1))
    for rows in (4, 6):
        for i in range(WARM_UP + 3):
            before = step.graphs.replays
            step(torch.ones(rows, 3), torch.ones(rows, 2))
            first = i < WARM_UP + (rows == 4)  # the very first step learns the layout
            assert (step.graphs.replays == before) == first
            assert (step.graphs.reason is None) == (not first)
    assert recorder_of(step).records == 2


def test_a_loss_is_fresh_and_a_batch_is_copied():
    net = Linear()
    step = step_of(net, SGD(net.parameters(), lr=0.001))
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    losses = [step(x, y) for _ in range(8)]
    assert len({float(loss) for loss in losses}) == 8
    x.mul_(2)
    y.zero_()
    alone = copy.deepcopy(net)
    assert torch.equal(step(x, y), mse(alone(x), y).detach())


@pytest.mark.parametrize(
    ("change", "records"),
    [
        (lambda step: step.optimizer.param_groups[0].update(lr=0.5), 1),
        (lambda step: step.module.first.weight.requires_grad_(False), 2),
        (lambda step: step.module.eval(), 2),
        (lambda step: setattr(step, "clip_norm", 0.1), 2),
        (lambda step: step.load_state_dict(step.state_dict()), 2),
        (lambda step: step.module.last.weight.data.fill_(1), 1),
    ],
    ids=["lr", "frozen", "eval", "clip", "load", "written"],
)
def test_what_is_changed_between_replays_is_seen(change, records):
    captured, plain = pair(OPTIMIZERS["momentum"])
    with warnings.catch_warnings(action="ignore"):
        for i, (x, y) in enumerate(batches(16, 8)):
            if i == 7:
                change(captured)
                change(plain)
            assert torch.equal(captured(x, 2, y), plain(x, 2, y))
            assert same(captured.module, plain.module)
    assert recorder_of(captured).records == records
    assert captured.graphs.replays >= 8


def test_a_layer_that_is_replaced_is_recorded_anew_on_one_rank():
    """Which runs the user's own module."""
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 2)).double()
    captured, plain = pair(OPTIMIZERS["momentum"], 1, net)
    for i, (x, y) in enumerate(batches(14, 8)):
        for step in (captured, plain) if i == 6 else ():
            step.module[1] = nn.BatchNorm1d(6, affine=False, momentum=0.9).double()
        torch.testing.assert_close(captured(x, y), plain(x, y), rtol=0, atol=1e-12)
        for one, other in zip(captured.module.buffers(), plain.module.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert recorder_of(captured).records == 2
    assert captured.graphs.replays >= 5


def test_running_statistics_are_replayed():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    captured, plain = pair(OPTIMIZERS["momentum"], net=net)
    for x, y in batches(10, 8):
        captured(x, y)
        plain(x, y)
    assert captured.graphs.replays == 6
    for one, other in zip(captured.module.buffers(), plain.module.buffers(), strict=True):
        assert torch.equal(one, other)


def scaled_pair(make, ranks):
    """Return steps over one weight and an offset with running statistics: gradients are whole powers of two."""
    net = OneWeight()
    twin = copy.deepcopy(net)
    settings = {"reduction": "sum", "amp_dtype": torch.float16}
    captured = step_of(net, make(net.parameters()), ranks, total, **settings)
    plain = TrainStep(twin, total, make(twin.parameters()), cpu(ranks), error_if_nonfinite=False, **settings)
    return captured, plain


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_in_a_replay_skips_its_update(name, ranks):
    """100 steps with a scheduler, two of which overflow on the last rank: the same bits as ordinary ones."""
    captured, plain = scaled_pair(OPTIMIZERS[name], ranks)
    schedules = [StepLR(step.optimizer, 30, 0.5) for step in (captured, plain)]
    x, y = torch.ones(2 * ranks, 1), torch.full((2 * ranks, 1), 0.125)
    over = y.clone()
    over[-1] = 5.0  # times 65536, and times 32768: more than float16 holds
    for i in range(100):
        target = over if i in (40, 70) else y
        before = captured.graphs.replays
        assert torch.equal(captured(x * (i % 3), target), plain(x * (i % 3), target))
        assert same(captured.module, plain.module)
        assert all(map(torch.equal, captured.module.buffers(), plain.module.buffers()))
        grads = captured.module.weight.grad, plain.module.weight.grad
        assert (i in (40, 70)) == (grads[0] is None) == (grads[1] is None)
        assert captured.loss_scale.state_dict() == plain.loss_scale.state_dict()
        assert captured.steps == plain.steps
        assert i not in (40, 70) or captured.graphs.replays == before + 1
        for schedule in schedules:
            schedule.step()
    assert captured.loss_scale.skipped == 2
    assert captured.steps == 98
    assert captured.graphs.replays >= 80
    assert recorder_of(captured).records == 3  # of three scales
    one, other = captured.optimizer.state_dict()["state"][0], plain.optimizer.state_dict()["state"][0]
    assert all(torch.equal(one[key], value) for key, value in other.items())


def test_a_loss_that_is_nan_in_a_replay_ends_in_an_error():
    captured, plain = scaled_pair(OPTIMIZERS["momentum"], 2)
    x, y = torch.ones(4, 1), torch.full((4, 1), 0.25)
    for step in (captured, plain):
        step.loss_scale.scale = 0.5
        for i in range(6):
            step(x * i, y)
    assert captured.graphs.replays == 2
    for step in (captured, plain):
        with pytest.raises(FloatingPointError, match=r"not finite at a loss scale of 0\.5"):
            step(x * 7, y * float("nan"))
        assert step.module.weight.grad is None
    assert captured.graphs.replays == 3
    captured(x, y)
    plain(x, y)
    assert same(captured.module, plain.module)
    assert all(map(torch.equal, captured.module.buffers(), plain.module.buffers()))
    assert captured.graphs.replays == 4
    assert captured.steps == plain.steps == 7


def test_weights_are_those_of_each_batch(ranks):
    def weighed(output, target):
        return ((output - target) ** 2).sum(), (target != 0).sum()

    net = Linear()
    twin = copy.deepcopy(net)
    settings = {"reduction": "weighted", "error_if_nonfinite": False, "clip_norm": 8.0}
    make = OPTIMIZERS["momentum"]
    captured = step_of(net, make(net.parameters()), ranks, weighed, **settings)
    plain = TrainStep(twin, weighed, make(twin.parameters()), cpu(ranks), **settings)
    for i in range(12):
        x, y = torch.ones(12, 3), torch.arange(24.0).sub(i).clamp(min=0).view(12, 2)
        assert torch.equal(captured(x, y), plain(x, y))
        assert same(captured.module, plain.module)
    assert captured.graphs.replays == 8


def test_a_buffer_in_another_index_is_recorded_anew():
    """By a rebuild: a step that is captured has a static module."""
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    captured, plain = pair(OPTIMIZERS["momentum"], net=net)
    old = captured.module[1].running_mean
    for i, (x, y) in enumerate(batches(25, 8)):
        for step in (captured, plain) if i in (6, 12) else ():
            step.module[1].running_mean = torch.full((6,), float(i)).double()
            step.rebuild()
            without_gpu(captured)
        assert torch.equal(captured(x, y), plain(x, y))
        assert all(map(torch.equal, captured.module.buffers(), plain.module.buffers()))
    assert recorder_of(captured).records == 1
    assert captured.module[1].running_mean is not old
    assert same(captured.module, plain.module)


class Scaled(Linear):
    def forward(self, x, scale):
        return self.last(x) * scale


def test_keywords_are_copied():
    captured, plain = pair(OPTIMIZERS["momentum"], 1, Scaled().double())
    for i, (x, y) in enumerate(batches(9, 8, columns=3)):
        scale = torch.full((8, 1), float(i)).double()
        assert torch.equal(captured(x, y, scale=scale), plain(x, y, scale=scale))
    assert same(captured.module, plain.module)
    assert captured.graphs.replays > 0


class Counts(Linear):
    """Replace a buffer by a new tensor in every n-th forward."""

    def __init__(self, every):
        super().__init__()
        self.register_buffer("still", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))
        self.calls = cycle([True] * (every - 1) + [False])

    def forward(self, x):
        if next(self.calls):
            self.count.add_(1)
        else:
            self.count = self.count + 1
        return self.last(x)


@pytest.mark.parametrize("every", [1, WARM_UP + 2])
def test_a_forward_that_replaces_a_buffer_is_not_captured(every):
    """In every call: most are the first of their kind.  Seldom: it is found out by the recording."""
    captured, plain = pair(OPTIMIZERS["momentum"], 1, Counts(every).double())
    with warnings.catch_warnings(record=True, action="always") as told:
        for i, (x, y) in enumerate(batches(9, 8, columns=3), start=1):
            assert torch.equal(captured(x, y), plain(x, y))
            assert captured.module.count == plain.module.count == i
    assert same(captured.module, plain.module)
    assert captured.graphs.replays == 0
    assert (
        len([each for each in told if "another tensor in place of buffer count" in str(each.message)]) == 1
        or every == 1
    )


def test_another_ranks_buffer_in_another_index_is_recorded_anew():
    """A mask that is kept by its number of rows: a batch that is cut otherwise gives one rank a new one."""

    class Masked(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(4, 1))

        def forward(self, x):
            if len(self.mask) != len(x):
                self.mask = torch.ones(len(x), 1)
            return self.last(x * self.mask)

    captured, plain = pair(OPTIMIZERS["momentum"], 2, Masked().double())
    with warnings.catch_warnings(action="ignore"):
        for x, y in batches(20, [8] * 6 + [7], columns=3):
            assert torch.equal(captured(x, y), plain(x, y))
            assert same(captured.module, plain.module)
    assert len(captured.graphs) >= 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("at", [0, 6, 12])
def test_an_overflow_is_told_as_the_host_would_tell_it(value, at):
    """Also where the norm of finite numbers would be infinite."""
    sums = [torch.ones(5), torch.full((8,), 3e38)]
    sums[at > 4][at - 5 * (at > 4)] = value
    found = SimpleNamespace(every_sum=sums, sparse={})
    assert bool(overflow_of(found)) == (not are_finite(found)) == (value != 3e38)
