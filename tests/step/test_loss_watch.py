"""Losses that couple rows: found out in the first step, exact on the gathered outputs; further numbers of a loss."""

import copy
import re
import warnings
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from mgpu_core import TrainStep


def infonce(output, _):
    z = F.normalize(output, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def supcon(output, classes):
    z = F.normalize(output, dim=1)
    same = (classes[:, None] == classes) & ~torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.T / 0.1).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9).log_softmax(1)
    return -((logits * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def dice(output, classes):
    p, y = output.softmax(1), F.one_hot(classes, 4).to(output.dtype)
    return 1 - ((2 * (p * y).sum(0) + 1) / (p.sum(0) + y.sum(0) + 1)).mean()


def policy(output, classes):
    rewards = classes.to(output.dtype)
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return -(output.log_softmax(1)[:, 0] * advantage).mean()


COUPLED = {"infonce": infonce, "supcon": supcon, "dice": dice, "policy": policy}


def data(rows=24, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator).to(dtype), torch.arange(rows) % 4 * (torch.arange(rows) % 5 > 0)


def net_of(dtype=torch.float64, *more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), *more, nn.Tanh(), nn.Linear(6, 4)).to(dtype)


def are_close(net, alone):
    pairs = zip(net.parameters(), alone.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in pairs)


def step_of(net, loss_fn, ranks, **settings):
    return TrainStep(net, loss_fn, SGD(net.parameters(), lr=0.1, momentum=0.9), cpu(ranks), **settings)


@pytest.mark.several_ranks
@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_rows_is_told_of_once(name, ranks):
    step = step_of(net_of(), COUPLED[name], ranks)
    x, y = data()
    with pytest.warns(UserWarning, match=r'compares rows of different ranks: loss_on="gathered"') as told:
        first = step(x, y)
    assert len(told) == 1
    assert f"add up to {first:.6g}:" in str(told[0].message)
    assert told[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        step(x, y)


@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.filterwarnings("error")
def test_on_the_gathered_outputs_it_is_one_devices(name, ranks, workers):
    net = net_of()
    alone = copy.deepcopy(net)
    step = step_of(net, COUPLED[name], ranks, loss_on="gathered", workers=workers)
    optimizer = SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for rows in (24, 2, 7):
        x, y = data(rows)
        optimizer.zero_grad()
        loss = COUPLED[name](alone(x), y)
        loss.backward()
        optimizer.step()
        ours, outputs = step(x, y, return_outputs=True)
        assert abs(ours - loss) < 1e-9
        assert outputs.shape == (rows, 4)
        assert not outputs.requires_grad
    assert are_close(net, alone)
    assert abs(step.evaluate(x, y) - COUPLED[name](alone(x), y)) < 1e-9


@pytest.mark.several_ranks
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_gathered_and_accumulated(reduction, ranks):
    """Calls of different sizes count as one batch's."""
    losses = {
        "mean": F.mse_loss,
        "sum": lambda out, y: F.mse_loss(out, y, reduction="sum"),
        "weighted": lambda out, y: (F.mse_loss(out, y, reduction="sum"), out.numel() / 2),
    }
    net = net_of()
    alone = copy.deepcopy(net)
    step = step_of(net, losses[reduction], ranks, loss_on="gathered", reduction=reduction, accumulate=2, clip_norm=0.5)
    x = data(12)[0]
    y = torch.ones(12, 4).double()
    step(x[:4], y[:4])
    step(x[4:], y[4:])
    whole = losses[reduction](alone(x), y)
    (whole[0] / whole[1] if reduction == "weighted" else whole).backward()
    nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    SGD(alone.parameters(), lr=0.1, momentum=0.9).step()
    assert are_close(net, alone)


class Centre(nn.Module):
    """Keeps a running centre of the outputs, and compares with it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4).double())

    def forward(self, output, _):
        self.centre.lerp_(output.detach().mean(0), 0.5)
        return (output - self.centre).square().mean()


@pytest.mark.several_ranks
def test_buffers_and_random_numbers_are_those_of_a_step_that_is_not_checked(ranks):
    """Which has been so in an earlier call, from the same state."""
    x, y = data()
    net, loss, results = net_of(torch.float64, nn.Dropout(0.5)), Centre(), []
    step = step_of(net, loss, ranks)
    state = step.state_dict()
    for _ in range(2):
        step.load_state_dict(state)
        loss.centre.zero_()
        torch.manual_seed(3)
        with warnings.catch_warnings(action="ignore"):
            losses = [step(x, y) for _ in range(3)]
        results.append(
            [*losses, *(each.detach().clone() for each in net.parameters()), loss.centre.clone(), torch.rand(2)]
        )
    assert all(map(torch.equal, *results))


def quiet(dtype=torch.float32, more=(), target=None, **settings):
    return dtype, more, target, settings


NO_ALARM = {
    "cross entropy": (nn.CrossEntropyLoss(), quiet()),
    "a function": (F.cross_entropy, quiet()),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), quiet(reduction="sum")),
    "weighted": (
        lambda out, y: (F.cross_entropy(out, y, ignore_index=0, reduction="sum"), (y != 0).sum()),
        quiet(reduction="weighted"),
    ),
    "dropout": (F.cross_entropy, quiet(more=(nn.Dropout(0.5),))),
    "batch norm": (F.cross_entropy, quiet(more=(nn.BatchNorm1d(6),))),
    "bfloat16": (F.cross_entropy, quiet(amp_dtype=torch.bfloat16)),
    "half": (lambda out, y: F.cross_entropy(out.float(), y), quiet(torch.bfloat16)),
    "cancelling": (lambda out, y: (out * (y[:, None] - 1)).mean(), quiet()),
    "a loss with random numbers": (lambda out, y: (out * torch.rand(4)).mean(), quiet()),
    "a loss that fails on all rows": (lambda out, y: F.cross_entropy(out, y) if len(y) < 13 else 1 / 0, quiet()),
}


@pytest.mark.several_ranks
@pytest.mark.parametrize("name", NO_ALARM)
@pytest.mark.filterwarnings("error")
def test_no_false_alarm(name, ranks):
    loss_fn, (dtype, more, _, settings) = NO_ALARM[name]
    step = step_of(net_of(dtype, *more), loss_fn, ranks, **settings)
    x, y = data(dtype=dtype)
    step(x, y)
    step(x[:16], y[:16])


@pytest.mark.several_ranks
def test_a_mean_over_a_mask_of_its_own_is_advised_to_be_weighted(ranks):
    step = step_of(net_of(torch.float32), lambda out, y: (out.square().mean(1) * y).sum() / y.sum(), ranks)
    x, y = data(dtype=torch.float32)[0], torch.arange(24)  # no two ranks have the same sum
    with pytest.warns(UserWarning, match=r'divides by another number than that of its rows: reduction="weighted"'):
        step(x, y)


class Bank(nn.Module):
    """Keeps the outputs of all rows, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(4, dtype=torch.float64))

    def forward(self, out, y):
        loss = (out - self.bank).square().mean()
        with torch.no_grad():
            self.bank += out.sum(0)
        return loss


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, out, y):
        self.calls += 1
        return F.cross_entropy(out, y) * self.calls


def queued():
    queue = deque(maxlen=3)

    def loss_fn(out, y):
        queue.append(len(out))
        return F.cross_entropy(out, y)

    return loss_fn


COUNTED = {"calls": 0}


def counted_globally(out, y):
    COUNTED["calls"] += 1
    return F.cross_entropy(out, y)


STATES = {"bank": Bank, "calls": Counts, "queue": queued, "COUNTED": lambda: counted_globally}


@pytest.mark.several_ranks
@pytest.mark.parametrize("name", STATES)
def test_a_loss_that_keeps_a_state_is_told_of_once_and_called_once_per_rank(name, ranks):
    loss_fn = STATES[name]()
    step = step_of(net_of(), loss_fn, ranks)
    x, y = data()
    with pytest.warns(UserWarning, match=rf'keeps a state of its own .*{name}.*loss_on="gathered"') as told:
        step(x, y)
    assert len(told) == 1
    if name == "calls":
        assert loss_fn.calls == ranks
    with warnings.catch_warnings(action="error"):
        for _ in range(4):
            step(x, y)
    if name == "calls":
        assert loss_fn.calls == 5 * ranks


@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("error")
def test_a_loss_with_a_state_is_called_once_on_the_gathered_outputs(name, ranks):
    loss_fn, plain = STATES[name](), STATES[name]()
    net = net_of()
    alone = copy.deepcopy(net)
    step = step_of(net, loss_fn, ranks, loss_on="gathered")
    optimizer = SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x, y = data()
        optimizer.zero_grad()
        plain(alone(x), y).backward()
        optimizer.step()
        step(x, y)
    assert are_close(net, alone)


def hooked(net):
    """A loss that reads what a hook on a layer has taken."""
    taken = {}
    net[0].register_forward_hook(lambda module, args, out: taken.__setitem__("features", out))
    return lambda out, y: F.cross_entropy(out, y) + taken["features"].square().mean()


def listed(net):
    """A loss that takes what layers have put into a list."""
    losses = []
    net[0].register_forward_hook(lambda module, args, out: losses.append(out.square().mean()))

    def loss_fn(out, y):
        term = sum(losses)
        losses.clear()
        return F.cross_entropy(out, y) + term

    return loss_fn


@pytest.mark.parametrize("made", [hooked, listed])
@pytest.mark.filterwarnings("error")
def test_a_loss_that_reads_what_its_ranks_forward_has_left_is_right_in_the_callers_thread(made, ranks):
    net = net_of()
    alone = copy.deepcopy(net)
    step, plain = step_of(net, made(net), ranks, workers="caller"), made(alone)
    optimizer = SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x, y = data()
        optimizer.zero_grad()
        plain(alone(x), y).backward()
        optimizer.step()
        step(x, y)
    assert are_close(net, alone)


@pytest.mark.several_ranks
@pytest.mark.parametrize("made", [hooked, listed])
@pytest.mark.parametrize("settings", [{"loss_on": "gathered"}, {"workers": "threads"}])
def test_a_loss_that_reads_what_other_ranks_have_left_is_told_of(made, settings, ranks):
    net = net_of()
    step = step_of(net, made(net), ranks, **settings)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            step(*data())
        except RuntimeError:  # in threads a graph may be another rank's
            assert "workers" in settings
            return
    assert [each for each in found if re.search("the loss reads|the forward of Sequential changes", str(each.message))]


def test_check_loss_changes_nothing_and_says_what_it_found():
    net = net_of(torch.float64, nn.BatchNorm1d(6), nn.Dropout(0.5))
    step = step_of(net, infonce, 3)
    before = copy.deepcopy(net.state_dict())
    torch.manual_seed(5)
    numbers = torch.rand(3)
    torch.manual_seed(5)
    x, y = data()
    with pytest.warns(UserWarning, match="the loss of all rows together is"):
        found = step.check_loss(x, y)
    assert torch.equal(torch.rand(3), numbers)
    assert found.agrees is False
    assert abs(found.ranks - found.gathered) > 0.01
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())
    assert step.steps == 0
    agreeing = step_of(net_of(), F.cross_entropy, 3).check_loss(x, y)
    assert agreeing.agrees is True
    assert abs(agreeing.ranks - agreeing.gathered) < 1e-12


def test_a_gathered_loss_runs_under_autocast():
    seen = []

    def loss_fn(output, _):
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return output.float().mean()

    step = step_of(net_of(torch.float32), loss_fn, 2, loss_on="gathered", amp_dtype=torch.bfloat16)
    step(*data(dtype=torch.float32))
    assert set(seen) == {torch.bfloat16}


def test_check_loss_follows_the_module():
    step, (x, y) = step_of(net_of(), F.cross_entropy, 3), data()
    step(x, y)
    step.module[-1] = nn.Linear(6, 4, dtype=torch.float64)
    check = step.check_loss(x, y)
    assert check.ranks == pytest.approx(float(F.cross_entropy(step.module(x), y)))


@pytest.mark.parametrize(
    ("loss_fn", "ranks", "settings", "reason"),
    [
        (infonce, 1, {}, "one rank has all rows"),
        (infonce, 2, {"loss_on": "gathered"}, "no loss function that is called per rank"),
        (NO_ALARM["a loss with random numbers"][0], 2, {}, "draws random numbers"),
        (NO_ALARM["a loss that fails on all rows"][0], 2, {}, "failed .ZeroDivisionError"),
        (lambda out, y: out.expand(3 << 18, 24, 4).mean() if len(out) > 12 else out.mean(), 2, {}, "^$"),
    ],
)
def test_check_loss_says_why_it_cannot_judge(loss_fn, ranks, settings, reason):
    found = step_of(net_of(), loss_fn, ranks, **settings).check_loss(*data())
    assert (found.agrees is None) == (reason != "^$")
    assert re.search(reason, found.reason)


def test_of_outputs_that_are_too_large_some_rows_are_compared():
    class Large(nn.Linear):
        def forward(self, x):
            return super().forward(x).repeat(1, 2**18)

    x, y = torch.randn(18, 8), torch.ones(18)
    assert step_of(Large(8, 4), lambda out, y: out.mean(), 2).check_loss(x, y).agrees
    with pytest.warns(UserWarning, match="the loss of all rows together is"):
        found = step_of(Large(8, 4), lambda out, y: out.mean().square() * len(y), 2).check_loss(x, y)
    assert found.agrees is False


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"loss_fn": None}, "loss_fn=None"),
        ({"capture": True}, "capture=True"),
        ({"loss_on": "all"}, "loss_on must be one of ranks, gathered, not 'all'"),
    ],
)
def test_gathered_is_refused_by_name(settings, reason):
    net = net_of()
    settings = {"loss_fn": infonce, "loss_on": "gathered"} | settings
    with pytest.raises(ValueError, match=reason):
        TrainStep(net, settings.pop("loss_fn"), SGD(net.parameters(), lr=0.1), cpu(2), **settings)


# Further numbers.


@pytest.mark.parametrize("loss_on", ["ranks", "gathered"])
def test_further_numbers_are_weighed_like_the_loss(ranks, loss_on):
    def means(out, y):
        return F.mse_loss(out, y), {"mae": (out - y).abs().mean(), "rows": len(y)}

    def sums(out, y):
        return F.mse_loss(out, y, reduction="sum"), {"mae": (out - y).abs().sum(), "rows": len(y)}

    def weighted(out, y):
        return (*sums(out, y)[:1], out.numel(), {"mae": (out - y).abs().sum()})

    x, y = data(7)[0], torch.ones(7, 4).double()
    for loss_fn, reduction in ((means, "mean"), (sums, "sum"), (weighted, "weighted")):
        net = net_of()
        error = net(x) - y
        step = step_of(net, loss_fn, ranks, reduction=reduction, loss_on=loss_on)
        _, numbers = step.evaluate(x, y, aux=True)
        wanted = error.abs().sum() if reduction == "sum" else error.abs().mean()
        assert abs(numbers["mae"] - wanted) < 1e-5
        assert numbers["mae"].dim() == 0
        _, outputs, numbers = step(x, y, aux=True, return_outputs=True)
        assert abs(numbers["mae"] - wanted) < 1e-5
        assert outputs.shape == (7, 4)
        assert step(x, y).dim() == 0  # not asked for
    _, numbers = step_of(net_of(), sums, ranks, reduction="sum", loss_on=loss_on)(x, y, aux=True)
    assert numbers["rows"] == 7


def test_no_further_numbers_are_none():
    assert step_of(net_of(), F.mse_loss, 2)(data()[0], torch.ones(24, 4).double(), aux=True)[1] == {}


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (lambda loss: {"loss": loss}, TypeError, r'not a dict: return \(loss, \{"name": number\}\)'),
        (lambda loss: (loss, {"words": "many"}), TypeError, "the aux number words must be a tensor of one element"),
        (lambda loss: (loss, {"vector": torch.ones(3)}), ValueError, "the aux number vector must be one number"),
    ],
)
def test_other_results_are_refused(result, error, text):
    step = step_of(net_of(), lambda out, y: result(F.mse_loss(out, y)), 2)
    with pytest.raises(error, match=text):
        step(data()[0], torch.ones(24, 4).double(), aux=True)


def test_ranks_with_other_names_are_told():
    def named(out, y):
        return out.mean(), {f"of {len(y)} rows": 1.0}

    step = step_of(net_of(), named, 2)
    with pytest.raises(ValueError, match=r"rank 1 gave aux numbers named \['of 3 rows'\], and rank 0"):
        step(data(7)[0], torch.ones(7, 4).double(), aux=True)


def test_a_module_may_return_an_output_with_a_loss(ranks):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net_of()

        def forward(self, x, labels):
            logits = self.inner(x)
            return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)

    net = Model()
    x, y = data(9)
    wanted = net(x, y).loss
    assert abs(step_of(net, None, ranks)(x, labels=y) - wanted) < 1e-9


def test_a_call_without_a_target_names_it(ranks):
    step = step_of(net_of(), F.mse_loss, ranks)
    for inputs in ((), (data()[0],)):
        with pytest.raises(TypeError, match=r"a step needs a target .*step\(x, target\)"):
            step(*inputs)


@pytest.mark.parametrize("loss_on", ["ranks", "gathered"])
def test_objects_that_the_loss_has_let_go_of_are_freed(loss_on):
    class Loss:
        held: object = None

        def __call__(self, out, y):
            return F.mse_loss(out, y)

    loss_fn, (x, _) = Loss(), data(6)
    loss_fn.held = nn.Linear(2, 2)
    held = weakref.ref(loss_fn.held)
    step = step_of(net_of(), loss_fn, 2, loss_on=loss_on)
    for _ in range(3):
        step(x, torch.ones(6, 4).double())
    loss_fn.held = None
    assert held() is None


def test_further_numbers_are_not_those_of_the_loss():
    """Rank 0 has no labels, so the mean is rank 1's number."""
    best, y = torch.tensor(5.0), torch.tensor([-100, -100, 1, 2])
    step = step_of(net_of(), lambda out, y: (F.cross_entropy(out, y), {"best": best}), 2)
    _, numbers = step.evaluate(data(4)[0], y, aux=True)
    numbers["best"].mul_(2)
    assert best == 5
    _, numbers = step.evaluate(data(4)[0], torch.full((4,), -100), aux=True)
    assert numbers["best"].isnan()  # as the loss: there is nothing to weigh by
