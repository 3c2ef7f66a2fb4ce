"""A step that fails leaves everything as after the last update, on every device, and the next one works."""

import copy
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from fakes.collector import no_collector, wake_workers
from fakes.nets import cpu
from step.nets import Branches, Explode, Linear, assert_same, batches, mse, state_of
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_core import Pipeline, TrainStep, optim
from mgpu_core.step.grad_buckets import GradBuckets
from mgpu_core.step.optimizer_step import OptimizerStep


class Boom(Exception):
    pass


def fail():
    raise Boom("in backward")


def is_among(plan, tensor):
    """Return whether these are the rows of the rank that is to fail."""
    return "at" in plan and bool((tensor == plan["at"]).any())


class Plan(dict):
    """Shared by all copies of a module."""

    def __deepcopy__(self, memo):
        return self


class Fragile(nn.Module):
    """Fails where it is told to: `phase` on the rank whose rows contain `at`."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.plan = Plan()

    def forward(self, x):
        phase = self.plan.get("phase") if is_among(self.plan, x) else None
        hidden = self.norm(self.first(x))
        if phase == "forward":
            raise Boom("in forward")
        if phase == "interrupt":
            raise KeyboardInterrupt
        if phase == "nan":
            hidden = hidden * float("nan")
        hidden = Explode.apply(hidden, fail if phase == "backward" else int)
        return self.last(torch.tanh(hidden))


def loss_of(plan):
    def loss_fn(output, target):
        if plan.get("phase") == "loss" and is_among(plan, target):
            raise Boom("in the loss")
        if plan.get("phase") == "shape" and is_among(plan, target):
            return (output - target).mean(0)
        return mse(output, target)

    return loss_fn


def data():
    x = torch.arange(16.0).unsqueeze(1).expand(16, 4) / 4
    return x.contiguous(), torch.arange(32.0).reshape(16, 2)


def failing(plan, phase, rank, ranks):
    """Arms the plan: a number that only this rank's rows have."""
    x, y = data()
    first = rank * (16 // ranks)
    plan["at"] = float(y[first, 0]) if phase in ("loss", "shape") else float(x[first, 0])
    plan["phase"] = phase


EXPECTED = {
    "forward": (Boom, "in forward"),
    "loss": (Boom, "in the loss"),
    "shape": (ValueError, "the loss must be one number"),
    "backward": (Boom, "in backward"),
    "nan": (FloatingPointError, "is not finite"),
    "interrupt": (KeyboardInterrupt, None),
}


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("phase", EXPECTED)
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2), (8, 7)])
def test_every_phase_on_every_rank(ranks, rank, phase, when):
    torch.manual_seed(0)
    net = Fragile()
    alone = copy.deepcopy(net)
    alone.plan = {}
    step = TrainStep(net, loss_of(net.plan), AdamW(net.parameters(), lr=0.01), cpu(ranks))
    other = TrainStep(alone, loss_of({}), AdamW(alone.parameters(), lr=0.01), cpu(ranks))
    x, y = data()
    for each in (step, other):
        for _ in range(0 if when == "first" else 2):
            each(x, y)
    before = state_of(step)
    failing(net.plan, phase, rank, ranks)
    kind, text = EXPECTED[phase]
    with pytest.raises(kind, match=text) as caught:
        step(x, y)
    if ranks > 1 and phase not in ("interrupt", "nan"):
        assert f"in replica {rank} on device" in str(caught.value)
    if phase == "nan":
        assert f"rank {rank} " in str(caught.value)
    assert_same(before, state_of(step))
    assert all(each.grad is None for each in net.parameters())
    net.plan.clear()
    for each in (step, other):
        for _ in range(2):
            each(x, y)
    assert_same(state_of(step), state_of(other))
    step.check_replicas()


def test_a_failure_drops_what_was_accumulated(ranks):
    torch.manual_seed(0)
    net = Fragile()
    alone = copy.deepcopy(net)
    alone.plan = {}
    step = TrainStep(net, loss_of(net.plan), SGD(net.parameters(), lr=0.1), cpu(ranks), accumulate=2)
    other = TrainStep(alone, mse, SGD(alone.parameters(), lr=0.1), cpu(ranks), accumulate=2)
    x, y = data()
    before = state_of(step)
    step(x, y)
    failing(net.plan, "forward", ranks - 1, ranks)
    with pytest.raises(Boom):
        step(x, y)
    assert_same(before, state_of(step))
    net.plan.clear()
    for each in (step, other):
        each(x, y)
        each(x, y)
    assert_same(state_of(step), state_of(other))


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("ranks", r"is not finite, nor is the loss of rank 2 \(device cpu\); nothing"),
        ("gathered", "weight is not finite; nothing was updated"),
        ("window", "weight is not finite; nothing was updated"),
        ("ignored", r"is not finite, nor is the loss of rank 0 \(device cpu\); nothing"),
        ("pipeline", r"weight is not finite on rank 0 \(device cpu\); nothing"),
    ],
)
def test_the_error_says_what_is_known_of_where_a_nan_comes_from(way, text):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).to("cpu")
    x, y = torch.zeros(9, 4, device="cpu"), torch.zeros(9, 3, device="cpu")
    y[8] = float("nan")
    loss_fn, settings = nn.functional.mse_loss, {}
    if way == "ignored":  # the loss of the last rank is 0 / 0, and counts nothing
        x[0], y = float("nan"), torch.tensor([0, 1, 2] * 2 + [-100] * 3, device="cpu")
        loss_fn = nn.CrossEntropyLoss()
    elif way in ("gathered", "window"):
        settings = {"loss_on": "gathered"} if way == "gathered" else {"accumulate": 2}
    module = Pipeline(net, ["cpu"] * 2, chunks=4) if way == "pipeline" else net
    devices = None if way == "pipeline" else ["cpu"] * 3
    step = TrainStep(module, loss_fn, SGD(net.parameters(), lr=0.1), devices, **settings)
    if way == "window":
        step(x, y)
        y = torch.zeros_like(y)
    with pytest.raises(FloatingPointError, match=text):
        step(x, y)


@pytest.mark.several_ranks
def test_a_sum_that_fails_fails_the_step(ranks, monkeypatch):
    torch.manual_seed(0)
    net = Branches()
    step = TrainStep(net, mse, Adam(net.parameters()), cpu(ranks))
    ((x, y),) = batches(1, 8, dtype=torch.float32)
    step(x, 2, y)
    before = state_of(step)

    def fail(*_, **__):
        raise Boom("in a bucket")

    with monkeypatch.context() as patch:
        patch.setattr(GradBuckets, "add_ranks", fail)
        with pytest.raises(Boom, match="in a bucket"):
            step(x, 2, y)
    assert_same(before, state_of(step))
    step(x, 2, y)


def test_nonfinite_gradients_may_be_allowed():
    net = Fragile()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), error_if_nonfinite=False)
    net.plan.update(phase="nan", at=0.0)
    x, y = data()
    step(x, y)
    assert not bool(torch.isfinite(net.last.weight).all())


@pytest.mark.parametrize("error_if_nonfinite", [True, False])
@pytest.mark.parametrize("settings", [{"clip_norm": 1.0}, {}, {"accumulate": 2}], ids=["clip", "as it is", "two calls"])
@pytest.mark.parametrize("kind", [SGD, optim.SGD], ids=["torch", "ours"])
def test_a_batch_without_any_weight_has_a_gradient_of_zero(kind, settings, error_if_nonfinite, ranks):
    """As of a mean over labels that are all ignored; 1/0 is no factor of anything, not even between parameters."""

    def weighed(output, target):
        counts = (target >= 0).double()
        return ((output - target) ** 2 * counts).sum(), counts.sum()

    net = Linear().double()
    settings = settings | {"reduction": "weighted", "error_if_nonfinite": error_if_nonfinite}
    step = TrainStep(net, weighed, kind(net.parameters(), lr=0.1), cpu(ranks), **settings)
    x, y = data()[0][:, :3].double(), data()[1].double()
    for _ in range(settings.get("accumulate", 1)):
        step(x, y.abs())
    before = copy.deepcopy(net.state_dict())
    for _ in range(settings.get("accumulate", 1)):
        assert bool(torch.isnan(step(x, y * 0 - 1)))
    assert step.steps == 2
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    for _ in range(settings.get("accumulate", 1)):
        step(x, y.abs())
    assert all(bool(torch.isfinite(each).all()) for each in net.parameters())
    assert not any(torch.equal(each, before[name]) for name, each in net.state_dict().items())


def test_out_of_memory_names_the_rank():
    class Greedy(Linear):
        def forward(self, x):
            if bool((x == 5).any()):
                torch.empty(2**62, device=x.device)
            return super().forward(x)

    net = Greedy()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    x = torch.zeros(4, 3)
    x[3] = 5
    with pytest.raises(RuntimeError, match="in replica 1"):
        step(x, torch.zeros(4, 2))
    step(torch.zeros(4, 3), torch.zeros(4, 2))


def test_the_graph_of_a_failed_step_is_freed():
    net, seen = Fragile(), []
    net.first.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    step = TrainStep(net, loss_of(net.plan), SGD(net.parameters(), lr=0.1), cpu(2))
    x, y = data()
    failing(net.plan, "loss", 0, 2)
    with no_collector():
        with pytest.raises(Boom):
            step(x, y)
        wake_workers()
        assert seen
        assert all(each() is None for each in seen)


@pytest.mark.filterwarnings("ignore:the fused kernels do not serve")
def test_a_hook_that_fails_behind_the_update():
    """Weights have been updated, as they would be without us: so the step counts, and all that belongs to it."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    alone = copy.deepcopy(net)
    optimizers = [SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (net, alone)]
    plan = [None, Boom("behind the update"), None]

    def fails(*_):
        if error := plan[step.steps]:
            plan[step.steps] = None
            raise error

    step = TrainStep(net, mse, optimizers[0], cpu(1))
    optimizers[0].register_step_post_hook(fails)
    for i in range(3):
        x, y = torch.randn(8, 3), torch.randn(8, 2)
        with pytest.raises(Boom) if i == 1 else nullcontext():
            step(x, y)
        assert step.steps == i + 1
        optimizers[1].zero_grad()
        mse(alone(x), y).backward()
        optimizers[1].step()
    for (name, a), b in zip(net.state_dict().items(), alone.state_dict().values(), strict=True):
        assert torch.allclose(a.to(b), b, atol=1e-6), name


def test_an_update_that_fails_before_it_begins_does_not_count(monkeypatch):
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    x, y = torch.ones(4, 3), torch.zeros(4, 2)

    def fails(*_):
        raise Boom("before the update")

    with monkeypatch.context() as patch:
        patch.setattr(OptimizerStep, "prepare", fails)
        with pytest.raises(Boom):
            step(x, y)
    assert step.steps == 0
    step(x, y)
    assert step.steps == 1


def test_a_rank_that_never_ends_breaks_the_step_but_not_the_net(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.3")
    net = Linear()
    stuck = threading.Event()

    def loss_fn(output, target):
        if bool((target == 9).any()):
            stuck.wait(20)
        return mse(output, target)

    step = TrainStep(net, loss_fn, SGD(net.parameters(), lr=0.1), cpu(2), workers="threads")
    y = torch.zeros(4, 2)
    y[3] = 9
    with pytest.raises(Exception, match="rank 1 did not end within"):
        step(torch.ones(4, 3), y)
    with pytest.raises(Exception, match=r"step\.rebuild\(\)"):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    stuck.set()
    step.rebuild()
    step(torch.ones(4, 3), torch.zeros(4, 2))


def test_steps_after_all_this_are_exact(ranks):
    net, alone = Linear(), Linear()
    step = TrainStep(net, lambda o, y: (o * y).sum(), SGD(net.parameters(), lr=1.0), cpu(ranks), reduction="sum")
    x, y = torch.ones(8, 3), torch.ones(8, 2)
    with pytest.raises(RuntimeError):
        step(x[:, :2], y)
    step(x, y)
    (alone(x) * y).sum().backward()
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)


class Copies(TorchDispatchMode):
    """Notes the devices and dtypes of tensors that are copied together."""

    mgpu_core_thread_safe = True

    def __init__(self):
        super().__init__()
        self.kinds = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._foreach_copy_.default:
            self.kinds.append([{(each.device, each.dtype) for each in tensors} for tensors in args[:2]])
        return func(*args, **kwargs or {})


def test_buffers_are_copied_in_one_launch_per_device_and_dtype(ranks):
    """Torch copies a list of one kind at once, and others one by one: BatchNorm has counts next to its statistics."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(ranks))
    x, y = torch.ones(16, 3), torch.ones(16, 3)
    step(x, y)
    with Copies() as copies:
        step(x, y)
    kinds = [each for both in copies.kinds for each in both]
    assert len(kinds) >= 4
    assert all(len(each) == 1 for each in kinds)
