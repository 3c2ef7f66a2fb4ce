"""A step that fails leaves everything as after the last update, on every device, and the next one works."""

import copy
import inspect
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext, suppress

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.optim import SGD, Adam, AdamW
from train.nets import RANKS, Branches, Linear, batches, mse

from mgpu_core import DataParallel, TrainStep
from mgpu_core.train.optimizer_step import OptimizerStep


class Boom(Exception):
    pass


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            raise Boom("in backward")
        return grad, None


def is_among(plan, tensor):
    """Whether these are the rows of the rank that is to fail."""
    return "at" in plan and bool((tensor == plan["at"]).any())


class Fragile(nn.Module):
    """Fails where it is told to: `phase` on the rank whose rows contain `at`."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.plan = {}  # shared by all ranks' copies below

    def forward(self, x):
        phase = self.plan.get("phase") if is_among(self.plan, x) else None
        hidden = self.norm(self.first(x))
        if phase == "forward":
            raise Boom("in forward")
        if phase == "interrupt":
            raise KeyboardInterrupt
        if phase == "nan":
            hidden = hidden * float("nan")
        hidden = _Explode.apply(hidden, phase == "backward")
        return self.last(torch.tanh(hidden))

    def __deepcopy__(self, memo):
        plan, self.plan = self.plan, {}
        try:
            twin = nn.Module.__new__(type(self))
            memo[id(self)] = twin
            twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        finally:
            self.plan = twin.plan = plan
        return twin


def loss_of(plan):
    def loss_fn(output, target):
        if plan.get("phase") == "loss" and is_among(plan, target):
            raise Boom("in the loss")
        if plan.get("phase") == "shape" and is_among(plan, target):
            return (output - target).mean(0)
        return mse(output, target)

    return loss_fn


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
    "nan": (FloatingPointError, "not finite on rank"),
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
    assert all(each.grad is None for row in step._loop.replicas.parameters for each in row)
    net.plan.clear()
    for each in (step, other):
        for _ in range(2):
            each(x, y)
    assert_same(state_of(step), state_of(other))
    step.check_replicas()


@pytest.mark.parametrize("ranks", [1, 3])
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_that_fails_fails_the_step(ranks, monkeypatch):
    torch.manual_seed(0)
    net = Branches()
    step = TrainStep(net, mse, Adam(net.parameters()), cpu(ranks))
    ((x, y),) = batches(1, 8, dtype=torch.float32)
    step(x, 2, y)
    before = state_of(step)

    def fail(bucket):
        raise Boom("in a bucket")

    with monkeypatch.context() as patch:
        patch.setattr(step._loop.reducer, "_sum", fail)
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


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("error_if_nonfinite", [True, False])
@pytest.mark.parametrize("settings", [{"clip_norm": 1.0}, {}], ids=["clip", "as it is"])
def test_a_batch_without_any_weight_spoils_no_later_one(settings, error_if_nonfinite, ranks):
    """What lies between parameters in a bucket is not made NaN by a factor of 1/0."""

    def weighed(output, target):
        counts = (target >= 0).double()
        return ((output - target) ** 2 * counts).sum(), counts.sum()

    net = Linear().double()
    settings = settings | {"reduction": "weighted", "error_if_nonfinite": error_if_nonfinite}
    step = TrainStep(net, weighed, SGD(net.parameters(), lr=0.1), cpu(ranks), **settings)
    x, y = data()[0][:, :3].double(), data()[1].double()
    step(x, y.abs())
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(FloatingPointError) if error_if_nonfinite else nullcontext():
        step(x, y * 0 - 1)
    net.load_state_dict(before)
    step(x, y.abs())
    assert all(bool(torch.isfinite(each).all()) for each in net.parameters())


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
    import gc
    import weakref

    net, seen = Fragile(), []
    net.first.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    step = TrainStep(net, loss_of(net.plan), SGD(net.parameters(), lr=0.1), cpu(2))
    x, y = data()
    failing(net.plan, "loss", 0, 2)
    gc.disable()
    try:
        with pytest.raises(Boom):
            step(x, y)
        assert seen
        assert all(each() is None for each in seen)
    finally:
        gc.enable()


# Arguments that do not fit.


def net_and(**settings):
    net = Linear()
    return TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), **settings)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"reduction": "max"}, ValueError, "reduction must be one of mean, sum, weighted"),
        ({"accumulate": 0}, ValueError, "accumulate"),
        ({"accumulate": 1.5}, ValueError, "accumulate"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm"),
        ({"comm_dtype": torch.int8}, TypeError, "comm_dtype"),
        ({"algorithm": "magic"}, ValueError, "algorithm must be one of"),
        ({"shares": [1]}, ValueError, "2 ranks, 1 shares"),
        ({"rng": "mine"}, ValueError, "rng"),
        ({"bucket_nbytes": 0}, ValueError, "bucket_nbytes"),
    ],
)
def test_settings_that_no_step_can_have(settings, error, text):
    with pytest.raises(error, match=text):
        net_and(**settings)


def test_an_optimizer_over_other_parameters():
    net, other = Linear(), Linear()
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer's group 0, of shape \(2, 3\), is not one of"):
        TrainStep(net, mse, SGD(other.parameters(), lr=0.1), cpu(2))
    with pytest.raises(TypeError, match="optimizer must be"):
        TrainStep(net, mse, 0.1, cpu(2))


def test_things_that_are_no_module_or_loss():
    net = Linear()
    optimizer = SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"pass what it wraps, `net\.module`"):
        TrainStep(DataParallel(net, cpu(2)), mse, optimizer, cpu(2))
    with pytest.raises(TypeError, match="net must be"):
        TrainStep(mse, mse, optimizer, cpu(2))
    with pytest.raises(TypeError, match="loss_fn must be callable"):
        TrainStep(net, "mse", optimizer, cpu(2))
    with pytest.raises(ValueError, match="has parameters of its own"):
        TrainStep(net, nn.Linear(2, 1), optimizer, cpu(2))
    lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="uninitialized"):
        TrainStep(lazy, mse, SGD(lazy.parameters(), lr=0.1), cpu(2))


def test_inputs_that_do_not_fit():
    step = net_and()
    with pytest.raises(ValueError, match=r"inputs\[0\] has shape \(4, 3\).*target has shape \(5, 2\)"):
        step(torch.zeros(4, 3), torch.zeros(5, 2))
    with pytest.raises(TypeError, match="target as its last positional argument"):
        step()
    step(torch.zeros(4, 3), torch.zeros(4, 2))


@pytest.mark.filterwarnings("ignore:the fused kernels do not serve")
def test_a_hook_that_fails_behind_the_update():
    """The weights have been updated, as they would be without us: so the step counts, and all that belongs to it."""
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


def test_a_step_is_not_copied_or_saved():
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(1))
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save step\.state_dict\(\)"):
            call(step)


def test_settings_that_may_change_and_those_that_stay():
    step = net_and(clip_norm=2.0)
    before = step.accumulate, step.clip_norm, step.shares, step.optimizer
    for name, value in {"accumulate": 0, "clip_norm": -1.0, "shares": [1.0]}.items():
        with pytest.raises(ValueError, match=name):
            setattr(step, name, value)
    names = "module loss_fn optimizer team dim reduction amp_dtype comm_dtype bucket_nbytes algorithm"
    for name in [*names.split(), "shard_optimizer", "rng", "capture"]:
        with pytest.raises(AttributeError, match=f"{name} of a step stays as it was given: make a new step"):
            setattr(step, name, getattr(step, name))
    assert (step.accumulate, step.clip_norm, step.shares, step.optimizer) == before
    for wrong in ("a", True, float("nan")):
        with pytest.raises(ValueError, match="clip_norm must be a positive number"):
            step.clip_norm = wrong
    step.error_if_nonfinite = None
    assert step.error_if_nonfinite is True  # on the CPU
    step.accumulate, step.clip_norm, step.error_if_nonfinite = 2, None, False
    assert (step.accumulate, step.clip_norm, step.error_if_nonfinite) == (2, None, False)
    with pytest.raises(AttributeError):
        step.loss_scale = 1.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_ctrl_c_in_an_evaluation_waits_for_its_ranks(ranks):
    """Or they would write into the net later, and a step could begin beside them."""
    started, inside = threading.Event(), []

    class Slow(Linear):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread() and not self.training:
                inside.append(1)
                started.set()
                time.sleep(0.3)
                inside.pop()
            return super().forward(x)

    net = Slow().eval()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(ranks))
    batch = torch.ones(8, 3), torch.ones(8, 2)
    interrupt = threading.Thread(target=lambda: (started.wait(60), os.kill(os.getpid(), signal.SIGINT)))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        step.evaluate(*batch)
    assert not inside
    interrupt.join()
    net.train()
    step(*batch)


class Following(Linear):
    """Moves a copy of its weights in each forward."""

    def __init__(self):
        super().__init__()
        self.average = nn.Parameter(torch.zeros(2, 3), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.last.weight, 0.5)
        return super().forward(x)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_forward_that_writes_a_parameter(ranks):
    """One rank alone may; several that share its memory would each do it, at the same time."""
    net = Following()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(ranks))
    batch = torch.ones(8, 3), torch.ones(8, 2)
    for call in (step, step.evaluate, step):
        if ranks == 1:
            call(*batch)
        else:
            with pytest.raises(RuntimeError, match=r"the forward of rank 0 writes parameter average in place"):
                call(*batch)
    assert step.steps == (2 if ranks == 1 else 0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_embedding_that_renormalises_its_rows(ranks):
    net = nn.Embedding(4, 3, max_norm=0.1)
    step = TrainStep(net, lambda output, _: output.sum(), SGD(net.parameters(), lr=0.5), cpu(ranks), reduction="sum")
    with pytest.raises(RuntimeError, match="writes parameter weight in place"):
        step(torch.arange(4), torch.zeros(4))


def test_a_loss_without_a_gradient():
    net = Linear()
    step = TrainStep(net, lambda out, y: y.sum(), SGD(net.parameters(), lr=0.1), cpu(2))
    with pytest.raises(RuntimeError, match="does not depend on any parameter"):
        step(torch.zeros(4, 3), torch.zeros(4, 2))


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: (loss,), lambda loss: (loss, 1, 1)])
def test_a_weighted_loss_that_is_no_pair(returned):
    net = Linear()
    optimizer = SGD(net.parameters(), lr=0.1)
    step = TrainStep(net, lambda *pair: returned(mse(*pair)), optimizer, cpu(2), reduction="weighted")
    with pytest.raises(TypeError, match=r"returns \(sum, weight\)"):
        step(torch.zeros(4, 3), torch.zeros(4, 2))


def test_a_module_that_deepcopy_refuses():
    net = Linear()
    net.lock = threading.Lock()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    step(torch.zeros(4, 3), torch.ones(4, 2))
    assert step.steps == 1


def test_a_step_inside_a_step():
    net = Linear()
    steps = []

    def loss_fn(output, target):
        steps[0](torch.zeros(4, 3), torch.zeros(4, 2))

    steps.append(TrainStep(net, loss_fn, SGD(net.parameters(), lr=0.1), cpu(2)))
    with pytest.raises(RuntimeError, match="already running"):
        steps[0](torch.zeros(4, 3), torch.zeros(4, 2))


@pytest.mark.parametrize("wrong", [{}, {"format": "x"}, None])
def test_a_state_of_another_kind(wrong):
    with pytest.raises(ValueError, match="wanted a state with the mark"):
        net_and().load_state_dict(wrong)


def test_a_state_that_does_not_fit_changes_nothing():
    step = net_and()
    step(torch.ones(4, 3), torch.zeros(4, 2))
    before = state_of(step)
    for change, text in (
        (lambda s: s["module"].pop("last.weight"), "no last.weight"),
        (lambda s: s["module"].update(extra=torch.ones(1)), "has extra"),
        (lambda s: s["module"].update({"last.bias": torch.ones(7)}), r"last\.bias is \(7,\) in the state and \(2,\)"),
        (lambda s: s["optimizer"]["param_groups"][0]["params"].pop(), "groups of"),
    ):
        state = step.state_dict()
        change(state)
        with pytest.raises(ValueError, match=text):
            step.load_state_dict(state)
        assert_same(before, state_of(step))


# Signals.

SCRIPT = r"""
    import os, signal, sys, threading, time, torch, copy
    from mgpu_core import TrainStep
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    def loss_fn(out, y):
        if slow:
            os.write(1, b"slow\n")
            time.sleep({seconds})
        return ((out - y) ** 2).mean()
    slow = False
    step = TrainStep(net, loss_fn, torch.optim.AdamW(net.parameters()), ["cpu"] * {ranks})
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    step(x, y)
    before = copy.deepcopy(net.state_dict())
    slow = True
    try:
        step(x, y)
    except KeyboardInterrupt:
        slow = False
        same = all(torch.equal(before[k], v) for k, v in net.state_dict().items())
        step(x, y)
        step.check_replicas()
        print("interrupted", same, step.steps, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ctrl_c_in_the_middle_of_a_step(ranks):
    script = textwrap.dedent(SCRIPT).format(ranks=ranks, seconds=1.0)
    child = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "slow\n"
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert out.splitlines()[-1] == "interrupted True 2"
    assert child.returncode == 0


def test_ctrl_c_waits_for_the_end_of_the_update(monkeypatch):
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(2))
    original = step._loop.optimizer_step.prepare

    def prepare(*update):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return original(*update)

    monkeypatch.setattr(step._loop.optimizer_step, "prepare", prepare)
    before = net.last.weight.clone()
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert step.steps == 1, "the update was made whole"
    assert not torch.equal(before, net.last.weight)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_the_guard_leaves_nobody_inside():
    """At each line after the guard, as the interpreter may run the handler between any two."""
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(2))
    code = TrainStep.__call__.__wrapped__.__code__
    source, first = inspect.getsourcelines(code)
    guard = first + next(i for i, line in enumerate(source) if "with self._turn" in line)
    lines = sorted({line for _, _, line in code.co_lines() if line and line > guard})
    assert len(lines) >= 4
    for at in lines:

        def trace(frame, event, arg, at=at):
            def inside(frame, event, arg):
                if event == "line" and frame.f_lineno == at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
                return inside

            return inside if frame.f_code is code else None

        before = sys.gettrace()
        sys.settrace(trace)
        with suppress(KeyboardInterrupt):
            step(torch.ones(4, 3), torch.zeros(4, 2))
        sys.settrace(before)
        step(torch.ones(4, 3), torch.zeros(4, 2))
    step.close()


def test_a_rank_that_never_ends_breaks_the_step_but_not_the_net(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.3")
    net = Linear()
    stuck = threading.Event()

    def loss_fn(output, target):
        if bool((target == 9).any()):
            stuck.wait(20)
        return mse(output, target)

    step = TrainStep(net, loss_fn, SGD(net.parameters(), lr=0.1), cpu(2))
    y = torch.zeros(4, 2)
    y[3] = 9
    with pytest.raises(Exception, match="rank 1 did not end within"):
        step(torch.ones(4, 3), y)
    with pytest.raises(Exception, match=r"step\.rebuild\(\)"):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    stuck.set()
    step.rebuild()
    step(torch.ones(4, 3), torch.zeros(4, 2))


@pytest.mark.parametrize("ranks", RANKS)
def test_steps_after_all_this_are_exact(ranks):
    net, alone = Linear(), Linear()
    step = TrainStep(net, lambda o, y: (o * y).sum(), SGD(net.parameters(), lr=1.0), cpu(ranks), reduction="sum")
    x, y = torch.ones(8, 3), torch.ones(8, 2)
    with pytest.raises(RuntimeError):
        step(x[:, :2], y)
    step(x, y)
    (alone(x) * y).sum().backward()
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)
