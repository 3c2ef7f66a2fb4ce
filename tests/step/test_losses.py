"""Losses that leave rows out, or weigh classes: torch's own are one device's to the last digit, whatever a rank has."""

import copy
import warnings
from functools import partial

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mgpu_core import Pipeline, TrainStep

CLASSES = 4
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 7.0], dtype=torch.float64)


def on_first(loss_fn):
    return loss_fn.to(cpu(1)[0]) if isinstance(loss_fn, nn.Module) else loss_fn


class Shifted(nn.Module):
    """The loss of a language model: the label of each position is the next token."""

    def forward(self, out, y):
        return F.cross_entropy(out[:, :-1].flatten(0, 1), y[:, 1:].flatten(), ignore_index=-1)


LOSSES = {
    "function": F.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHT),
    "all of it": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
    "partial": partial(F.cross_entropy, label_smoothing=0.2),
    "lambda": lambda out, y: F.cross_entropy(out, y),
    "old words for a sum": partial(F.cross_entropy, size_average=False),
    "old words for a mean": partial(F.cross_entropy, size_average=True, label_smoothing=0.1),
    "two steps": lambda out, y: F.nll_loss(F.log_softmax(out, 1), y),
    "weights by hand": lambda out, y: F.cross_entropy(out, y, WEIGHT.to(out.device)),
    "twice": lambda out, y: 2 * F.cross_entropy(out, y),
    "a part": lambda out, y: F.cross_entropy(out, y).div(4).to(torch.float64),
    "a sum": nn.CrossEntropyLoss(reduction="sum"),
    "with a number": lambda out, y: (F.cross_entropy(out, y), {"largest": out.max().detach()}),
}


def net_of():
    torch.manual_seed(0)
    return nn.Linear(3, CLASSES).double().to(cpu(1)[0])


def batches(count=4, rows=9, ignored=-100):
    """The first one has all labels; later ones leave some out, and at last whole ranks have none."""
    generator = torch.Generator("cpu").manual_seed(1)
    found = []
    for index in range(count):
        x = torch.randn(rows, 3, generator=generator, dtype=torch.float64, device="cpu")
        y = torch.randint(0, CLASSES, (rows,), generator=generator, device="cpu")
        y[: (0, 2, 4, 6)[index % 4]] = ignored
        found.append((x.to(cpu(1)[0]), y.to(cpu(1)[0])))
    return found


def alone(loss_fn, data, lr=0.5, accumulate=1):
    """The plain loop: losses and parameters of one device, a window's rows joined."""
    net, loss_fn, losses = net_of(), on_first(loss_fn), []
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for begin in range(0, len(data), accumulate):
        x, y = (torch.cat(each) for each in zip(*data[begin : begin + accumulate], strict=True))
        optimizer.zero_grad()
        loss = loss_fn(net(x), y)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [each.detach() for each in net.parameters()]


def assert_same(net, parameters, tolerance=1e-12):
    for one, other in zip(net.parameters(), parameters, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "size_average and reduce args")  # torch's of its old arguments
        yield


@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_torch_is_one_devices(name, workers, ranks):
    net, loss_fn = net_of(), on_first(LOSSES[name])
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.5), cpu(ranks), workers=workers)
    losses, parameters = alone(loss_fn, batches())
    assert [step(x, y).item() for x, y in batches()] == pytest.approx(losses, rel=1e-12)
    assert_same(net, parameters)


@pytest.mark.several_ranks
@pytest.mark.parametrize("name", ["function", "weights by hand", "lambda"])
def test_an_evaluation_and_further_numbers_are_weighed_alike(name, ranks):
    net, loss_fn = net_of(), on_first(LOSSES[name])
    step = TrainStep(
        net, lambda out, y: (loss_fn(out, y), {"again": loss_fn(out, y)}),
        torch.optim.SGD(net.parameters(), lr=0.5), cpu(ranks),
    )  # fmt: skip
    x, y = batches()[3]
    wanted = loss_fn(net(x), y).item()
    loss, numbers = step.evaluate(x, y, aux=True)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    assert numbers["again"].item() == pytest.approx(wanted, rel=1e-6)
    loss, numbers = step(x, y, aux=True)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    assert numbers["again"].item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", ["function", "module", "class weights", "lambda"])
@pytest.mark.parametrize("loss_on", ["ranks", "gathered"])
def test_the_calls_of_an_update_are_one_batch(name, loss_on, ranks):
    """Also on one rank: each call counts by its labels, and not by its rows."""
    net, loss_fn = net_of(), on_first(LOSSES[name])
    _, parameters = alone(loss_fn, batches(), accumulate=2)
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.5), cpu(ranks), accumulate=2, loss_on=loss_on)
    for x, y in batches():
        step(x, y)
    assert_same(net, parameters)


def test_calls_that_are_kept_for_an_update_are_one_batch(ranks):
    net = net_of()
    _, parameters = alone(F.cross_entropy, batches(), accumulate=4)
    step = TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.5), cpu(ranks))
    *first, last = batches()
    with step.no_sync():
        for x, y in first:
            step(x, y)
    step(*last)
    assert_same(net, parameters)


@pytest.mark.parametrize("how", ["module", "lambda"])
def test_labels_of_pixels_and_of_tokens(how, ranks):
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 3, (6, 5, 5))
    y[:4, :4] = 255
    loss_fn = nn.CrossEntropyLoss(ignore_index=255)
    net = nn.Conv2d(2, 3, 1).double()
    wanted = torch.autograd.grad(loss_fn(net(x), y), net.weight)[0]
    net, x, y = net.to(cpu(1)[0]), x.to(cpu(1)[0]), y.to(cpu(1)[0])
    function = loss_fn if how == "module" else lambda out, y: loss_fn(out, y)
    before = net.weight.detach().clone()
    TrainStep(net, function, torch.optim.SGD(net.parameters(), lr=1.0), cpu(ranks))(x, y)
    assert torch.allclose(before - net.weight, wanted.to(before.device), rtol=1e-12)


def test_a_loss_with_shifted_labels(ranks):
    torch.manual_seed(0)
    tokens = torch.randint(0, 5, (6, 7))
    for row in range(6):
        tokens[row, 1 + row :] = -1
    net = nn.Embedding(6, 5).double()
    inputs = tokens.clamp(min=0)
    wanted = torch.autograd.grad(Shifted()(net(inputs), tokens), net.weight)[0]
    net, inputs, tokens = net.to(cpu(1)[0]), inputs.to(cpu(1)[0]), tokens.to(cpu(1)[0])
    before = net.weight.detach().clone()
    TrainStep(net, Shifted(), torch.optim.SGD(net.parameters(), lr=1.0), cpu(ranks))(inputs, tokens)
    assert torch.allclose(before - net.weight, wanted.to(before.device), rtol=1e-12, atol=1e-15)


def test_probabilities_as_targets_are_a_mean_over_rows(ranks):
    net, x = net_of(), batches()[0][0]
    y = torch.softmax(x @ x.new_ones(3, CLASSES) + x[:, :1], 1)
    loss_fn = on_first(nn.CrossEntropyLoss(weight=WEIGHT))
    wanted = loss_fn(net(x), y).item()
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.5), cpu(ranks))
    assert step(x, y).item() == pytest.approx(wanted, rel=1e-12)


def test_without_any_label_the_loss_is_nan_and_nothing_is_learnt(ranks):
    net = net_of()
    before = [each.detach().clone() for each in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    step = TrainStep(net, F.cross_entropy, optimizer, cpu(ranks), error_if_nonfinite=False)
    x, y = batches()[0]
    assert step(x, torch.full_like(y, -100)).isnan()
    assert step.steps == 1
    assert_same(net, before)


@pytest.mark.several_ranks
def test_a_scale_of_float16_skips_no_update_that_a_mean_does_not_skip(ranks):
    """The factor before backward is near that of a mean, and not of a sum over many labels."""
    warnings.filterwarnings("ignore", "float16 is slow on CPUs")
    torch.manual_seed(0)
    net = nn.Embedding(16, 16).to(cpu(1)[0])
    step = TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), cpu(ranks), amp_dtype=torch.float16
    )
    tokens = torch.randint(0, 16, (4 * ranks, 512), device=cpu(1)[0])
    for _ in range(3):
        step(tokens.flatten(), tokens.roll(1, 1).flatten())
    assert step.steps == 3


@pytest.mark.several_ranks
def test_a_function_that_looks_for_labels_itself_is_one_devices(ranks):
    def loss_fn(out, y):
        return F.cross_entropy(out, y) if (y != -100).any() else out.sum() * 0

    net = net_of()
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.5), cpu(ranks))
    losses, parameters = alone(F.cross_entropy, batches())
    assert [step(x, y).item() for x, y in batches()] == pytest.approx(losses, rel=1e-12)
    assert_same(net, parameters)


@pytest.mark.several_ranks
def test_ranks_that_return_other_kinds_of_losses_are_refused(ranks):
    def loss_fn(out, y):
        return F.cross_entropy(out, y) if (y != -100).any() else out.square().mean()

    net = net_of()
    before = [each.detach().clone() for each in net.parameters()]
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.5), cpu(ranks))
    x, y = batches()[0]
    y[: -(-len(y) // ranks)] = -100  # all of rank 0
    with pytest.raises(RuntimeError, match=r'mean over labels, .* pass reduction="weighted"'):
        step(x, y)
    assert_same(net, before)


def test_a_term_that_comes_later_is_told_of_once(ranks):
    """And a loss with a term more is weighed by rows, as ever."""
    terms = []

    def loss_fn(out, y):
        loss = F.cross_entropy(out, y)
        if terms:
            loss = loss + F.cross_entropy(out @ out.T, torch.arange(len(out), device=out.device))
        return loss

    net, (x, y) = net_of(), batches()[0]
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.01), cpu(ranks))
    for _ in range(5):
        step(x, y)
    terms.append(1)
    told = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(12):
            step(x, y)
    told = [str(each.message) for each in found if "the loss of all rows together" in str(each.message)]
    assert len(told) == (ranks > 1)


@pytest.mark.parametrize("name", ["function", "class weights", "lambda"])
def test_micro_batches_of_a_pipeline(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double().to(cpu(1)[0])
    loss_fn = on_first(LOSSES[name])
    data = batches()
    wanted, losses = [each.detach().clone() for each in net.parameters()], []
    for x, y in data:
        loss = loss_fn(net(x), y)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(net.parameters(), grads, strict=True):
                parameter -= 0.5 * grad
        losses.append(loss.item())
    trained = [each.detach().cpu() for each in net.parameters()]
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), wanted, strict=True):
            parameter.copy_(value)
    pipeline = Pipeline(net, cpu(2), split_points=["2"], chunks=3)
    step = TrainStep(pipeline, loss_fn, torch.optim.SGD(pipeline.parameters(), lr=0.5))
    assert [step(x, y).item() for x, y in data] == pytest.approx(losses, rel=1e-12)
    for one, other in zip(net.parameters(), trained, strict=True):
        assert torch.allclose(one.detach().cpu(), other, rtol=1e-12, atol=1e-12)


@pytest.mark.several_ranks
def test_soft_targets_first_and_labels_later_are_weighed(ranks):
    net, loss_fn = net_of(), lambda out, y: F.cross_entropy(out, y)
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), cpu(ranks))
    x, y = batches()[3]
    step(x, torch.softmax(x @ x.new_ones(3, CLASSES) + x[:, :1], 1))
    wanted = loss_fn(net(x), y).item()
    assert step.evaluate(x, y).item() == pytest.approx(wanted, rel=1e-12)


def added(out, y):
    return F.cross_entropy(out, y) + out.square().mean()


def added_in_place(out, y):
    loss = F.cross_entropy(out, y)
    loss += out.square().mean()
    return loss


@pytest.mark.several_ranks
@pytest.mark.parametrize("loss_fn", [added, added_in_place])
@pytest.mark.parametrize("unlabelled", [4, 6])
def test_a_term_of_rows_beside_labels_is_told_of(loss_fn, unlabelled, ranks):
    """With six of nine rows without a label, some rank has none: its mean is NaN."""
    net = net_of()
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.5), cpu(ranks), error_if_nonfinite=False)
    x, y = batches()[unlabelled // 2]
    with pytest.warns(UserWarning, match=f"the loss of all rows together is {loss_fn(net(x), y).item():.6g}, but"):
        step(x, y)


@pytest.mark.several_ranks
def test_a_comparison_that_says_nothing_is_made_again(ranks):
    """The first step has no label, so that its loss is not a number."""
    net = net_of()
    step = TrainStep(
        net, lambda out, y: 0.5 * F.cross_entropy(out, y) + (out - out.mean(0)).square().mean(),
        torch.optim.SGD(net.parameters(), lr=0.01), cpu(ranks), error_if_nonfinite=False,
    )  # fmt: skip
    (x, y), *_ = batches()
    step(x, torch.full_like(y, -100))
    with pytest.warns(UserWarning, match="the loss of all rows together is"):
        step(x, y)


def test_a_checkpointed_loss_runs_as_often_as_on_one_device():
    """The weight that torch has kept is behind the checkpoint, which would run the loss again to give it."""
    calls = []

    def counted(out, y):
        calls.append(1)
        return F.cross_entropy(out, y)

    net = nn.Linear(3, CLASSES, device=cpu(1)[0])
    loss_fn = partial(checkpoint, counted, use_reentrant=False)
    step = TrainStep(
        net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), cpu(2), workers="caller", reduction="mean"
    )
    x, y = torch.randn(6, 3, device=cpu(1)[0]), torch.tensor([0, 1, -100, 2, 3, 1], device=cpu(1)[0])
    with pytest.warns(UserWarning, match="keeps a state of its own"):  # it counts
        step(x, y)
    del calls[:]
    step(x, y)
    assert len(calls) == 2 * 2  # on two ranks, forward and backward


def test_a_loss_module_of_the_host_is_moved_and_followed():
    """Also on several accelerators: what the user changes on it between steps counts."""
    first = cpu(1)[0]
    net = nn.Linear(4, 3).to(first)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device="cpu"), reduction="sum")
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), cpu(2), reduction="sum")
    assert loss_fn.weight.device == torch.device(first)
    x, y = torch.randn(6, 4, device=first), torch.tensor([0, 1, 2, 0, 1, 2], device=first)
    for factor in (1, 3):
        loss_fn.weight.mul_(factor)
        alone = copy.deepcopy(net)
        alone.zero_grad()
        loss_fn(alone(x), y).backward()
        step(x, y)
        assert torch.allclose(net.weight.grad, alone.weight.grad, atol=1e-5)
