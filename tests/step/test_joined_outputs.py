"""The outputs of all ranks as one device would have them: for the check of the loss, and for a loss on all outputs."""

import copy
import warnings

import pytest
import torch
from torch import nn

from mgpu_core import Rows, TrainStep
from mgpu_core.step.joined_outputs import UnjoinedError, gathered, joined_plainly

HOST = torch.device("cpu")


class Net(nn.Module):
    """A layer whose outputs are wrapped by a function."""

    def __init__(self, wrap):
        super().__init__()
        self.layer, self.scale, self.wrap = nn.Linear(4, 3), nn.Parameter(torch.ones(()) * 0.7), wrap

    def forward(self, x):
        return self.wrap(self.layer(x), x, self.scale)


def first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def mean_of(outputs, target):
    return (first(outputs) - target).pow(2).mean()


VARIANTS = {
    "a tensor": (lambda y, x, s: y, mean_of),
    "a count": (lambda y, x, s: (y, x.size(0)), lambda o, t: (o[0] - t).pow(2).sum() / o[1] / 3),
    "a count in a tensor": (lambda y, x, s: (y, torch.tensor(len(x))), lambda o, t: mean_of(o[0], t)),
    "a distribution": (lambda y, x, s: torch.distributions.Normal(y, 1.0), lambda o, t: -o.log_prob(t).mean()),
    "rows": (
        lambda y, x, s: (y, Rows(row.sum() for row in y)),
        lambda o, t: mean_of(o, t) + sum(o[1]) / len(o[1]),
    ),
    "time first": (lambda y, x, s: y.T, lambda o, t: (o.T - t).pow(2).mean()),
    "a temperature": (lambda y, x, s: (y, s.exp()), lambda o, t: (o[0] * o[1] - t).pow(2).mean()),
    "a mean of its rows": (lambda y, x, s: (y, y.pow(2).mean()), lambda o, t: mean_of(o, t) + o[1]),
    "a sum of its rows": (lambda y, x, s: (y, y.pow(2).sum()), lambda o, t: mean_of(o, t) + o[1] / len(o[0])),
    "none": (lambda y, x, s: (y, None), mean_of),
    "a text": (lambda y, x, s: (y, "logits"), mean_of),
    "a flag": (lambda y, x, s: (y, True), mean_of),
    "a float": (lambda y, x, s: (y, float(len(x))), lambda o, t: mean_of(o, t) * 1.0),
    "a dict of lists": (lambda y, x, s: {"y": [y, y * 2]}, lambda o, t: mean_of(o["y"][1], t)),
    "weights": (lambda y, x, s: (y, y.new_ones(3)), mean_of),
}


def trained(net, loss_fn, x, y, **options):
    """Return the loss of a step, the gradients by what SGD has moved, and the warnings."""
    before = [each.detach().clone() for each in net.parameters()]
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), 1.0), ["cpu"] * 2, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loss = step(x, y)
    moved = [one - other.detach() for one, other in zip(before, net.parameters(), strict=True)]
    return float(loss), moved, [str(each.message) for each in told if "of all rows together" in str(each.message)]


def batch():
    torch.manual_seed(3)
    return torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)


def net_of(wrap):
    torch.manual_seed(0)
    return Net(wrap).double()


@pytest.mark.parametrize("kind", VARIANTS)
def test_no_false_alarm(kind):
    wrap, loss_fn = VARIANTS[kind]
    x, y = batch()
    net = net_of(wrap)
    expected = copy.deepcopy(net)
    whole = loss_fn(expected(x), y)
    whole.backward()
    loss, moved, told = trained(net, loss_fn, x, y)
    assert told == []
    assert loss == pytest.approx(float(whole.detach()))
    for one, other in zip(moved, expected.parameters(), strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other.grad is None else other.grad)


def clip(outputs, _):
    one, other, scale = outputs
    logits = scale * one @ other.T
    labels = torch.arange(len(one))
    return (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2


def info_nce(outputs, _):
    return nn.functional.cross_entropy(outputs[0] @ outputs[0].detach().T, torch.arange(len(outputs[0])))


COUPLED = {
    "CLIP": (lambda y, x, s: (y, x[:, :3] * y.mean(), s.exp()), clip),
    "InfoNCE beside a number": (lambda y, x, s: (y, y.mean()), info_nce),
    "InfoNCE beside a flag": (lambda y, x, s: (y, False), info_nce),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_losses_that_couple_rows_are_found_beside_numbers(kind):
    wrap, loss_fn = COUPLED[kind]
    _, _, (text,) = trained(net_of(wrap), loss_fn, *batch())
    assert 'loss_on="gathered"' in text


def test_a_count_that_all_ranks_have_is_gathered_as_it_is():
    net = net_of(lambda y, x, s: (y, torch.tensor(3)))
    x, y = batch()
    loss_fn = lambda o, t: (o[0] - t).pow(2).mean() * o[1].sum()  # noqa: E731
    expected = float(loss_fn(copy.deepcopy(net)(x), y).detach())
    loss, _, told = trained(net, loss_fn, x, y, loss_on="gathered")
    assert told == []
    assert loss == pytest.approx(expected)


def test_clip_on_gathered_outputs_is_that_of_one_device():
    wrap = lambda y, x, s: (y, x[:, :3], s.exp())  # noqa: E731
    x, y = batch()
    net = net_of(wrap)
    expected = copy.deepcopy(net)
    whole = clip(expected(x), y)
    whole.backward()
    loss, moved, told = trained(net, clip, x, y, loss_on="gathered")
    assert told == []
    assert loss == pytest.approx(float(whole.detach()), rel=1e-12)
    for one, other in zip(moved, expected.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


@pytest.mark.parametrize("rows", [[3, 1], [2, 1, 1]])
def test_numbers_are_averaged_by_rows_with_their_gradients(rows):
    numbers = [torch.tensor(float(rank), requires_grad=True) for rank in range(len(rows))]
    outputs = [{"y": torch.full((count, 2), float(rank)), "n": numbers[rank]} for rank, count in enumerate(rows)]
    expected = sum(rank * count for rank, count in enumerate(rows)) / sum(rows)
    found = gathered(outputs, rows, HOST, 0)
    assert found["y"].shape == (sum(rows), 2)
    assert float(found["n"].detach()) == pytest.approx(expected)
    found["n"].backward()
    assert [float(each.grad) for each in numbers] == pytest.approx([count / sum(rows) for count in rows])
    assert float(joined_plainly(outputs, rows, 0)["n"].detach()) == pytest.approx(expected)


def test_without_rows_numbers_count_alike():
    assert float(gathered([torch.tensor(1.0), torch.tensor(3.0)], [0, 0], HOST, 0)) == 2


@pytest.mark.parametrize(
    ("outputs", "path"),
    [
        (lambda rank: (torch.zeros(3, 2),), "outputs[0] has no row for each row"),
        (lambda rank: {"a": len("ab")}, "outputs['a'] is a int"),
        (lambda rank: [torch.distributions.Normal(0.0, 1.0)], "outputs[0] is a Normal"),
        (lambda rank: f"rank {rank}", "outputs is a str"),
        (lambda rank: torch.tensor(3), "outputs has no row for each row"),
    ],
)
def test_what_cannot_be_joined_is_named(outputs, path):
    with pytest.raises(UnjoinedError) as caught:
        joined_plainly([outputs(rank) for rank in range(2)], [2, 1], 0)
    assert path in str(caught.value)


def test_such_outputs_are_not_judged():
    wrap, loss_fn = VARIANTS["a distribution"]
    net = net_of(wrap)
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), 1.0), ["cpu"] * 2)
    check = step.check_loss(*batch())
    assert check.agrees is None
    assert "outputs is a Normal" in check.reason
