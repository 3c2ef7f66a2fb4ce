"""Inputs that were not cut, outputs that are joined along another dimension, parts that are contiguous."""

import functools
import warnings

import numpy as np
import pytest
import torch
from fakes.nets import cpu
from fakes.wrapper import Lambda
from torch import nn
from torch.nn import functional as F

from mgpu_core import DataParallel, Replicate, Rows, TrainStep, gather


def numbers(*shape):
    return torch.randn(*shape, device=cpu(1)[0])


class Flat(nn.Module):
    """Looks up tokens of (rows, time), as a flat view of memory."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x):
        return self.table(x.view(-1)).view(*x.shape, 3)


@pytest.mark.several_ranks
@pytest.mark.parametrize("how", ["forward", "step", "keyword"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_are_contiguous_along_every_dimension(ranks, how, dim):
    net = Flat().to(cpu(1)[0])
    x = torch.randint(5, (4, 6), device=cpu(1)[0])
    if how == "forward":
        torch.testing.assert_close(DataParallel(net, cpu(ranks), dim=dim % 2)(x), net(x))
        return
    step = TrainStep(net, lambda o, y: o.mean(), torch.optim.SGD(net.parameters(), 0.0), cpu(ranks), dim=dim % 2)
    expected = net(x).mean()
    found = step(x, x) if how == "step" else step(x=x, *[x])  # noqa: B026
    torch.testing.assert_close(found, expected.detach())


def test_a_rank_may_write_its_part_along_another_dimension():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x.mul_(2) * self.scale

    net, x = Writes().to(cpu(1)[0]), torch.arange(12.0, device=cpu(1)[0]).reshape(3, 4)
    y = x.clone()
    step = TrainStep(net, lambda o, y: (o - y).mean(), torch.optim.SGD(net.parameters(), 0.0), cpu(2), dim=1)
    assert float(step(x, y)) == float(y.mean())
    assert torch.equal(x, y)


def message(*inputs, dim=0, **kwargs):
    net = Lambda(lambda self, *inputs, **kwargs: inputs[0])
    with pytest.raises(ValueError, match="differ in their number of rows") as caught:
        DataParallel(net, cpu(2), dim=dim)(*inputs, **kwargs)
    return str(caught.value)


def test_rows_in_proportion_are_unflattened():
    text = message(numbers(4, 2), numbers(12, 2))
    assert "inputs[1] has 3 rows for each of inputs[0]: pass inputs[1].unflatten(0, (4, 3))" in text
    assert "Replicate" not in text
    net = Lambda(
        lambda self, one, many: self.linear(one) + self.linear(many.flatten(0, 1)).unflatten(0, (-1, 3)).sum(1)
    )
    one, many = numbers(4, 2), numbers(12, 2)
    expected = net(one, many.unflatten(0, (4, 3)))
    torch.testing.assert_close(DataParallel(net, cpu(3))(one, many.unflatten(0, (4, 3))), expected)


def test_flat_data_goes_into_rows_by_length():
    text = message(torch.arange(11), torch.tensor([0, 2, 5, 7]))
    assert "mgpu_core.Rows(x.split(lengths))" in text
    assert "Replicate" not in text


def test_flat_targets_with_a_length_per_row_too():
    text = message(numbers(4, 7, 5), torch.arange(9), torch.tensor([2, 2, 2, 3]))
    assert "mgpu_core.Rows(x.split(lengths))" in text
    assert "Replicate" not in text


def test_another_dimension_that_all_have_is_named():
    text = message(numbers(7, 5), mems=[numbers(4, 5, 2), numbers(4, 5, 2)])
    assert "All have 5 entries along dimension 1: if those are the rows, pass dim=1" in text
    assert "Replicate" not in text


def test_a_list_of_unequal_rows_is_one_of_rows():
    text = message([numbers(rows, 8) for rows in (1, 2, 3)])
    assert text.endswith(". A list with one entry per row goes into mgpu_core.Rows(...)")


def test_two_readings_of_one_batch_are_both_named():
    text = message(numbers(8, 12), numbers(16, 12, 8))
    assert "All have 12 entries along dimension 1: if those are the rows, pass dim=1" in text
    assert "; or inputs[1] has 2 rows for each of inputs[0]: pass inputs[1].unflatten(0, (8, 2))" in text


def test_rows_along_another_dimension_of_one_argument_are_no_multiple():
    text = message(numbers(16, 5), numbers(4, 16))
    assert "inputs[1] has 16 entries along dimension 1: if those are its rows, pass inputs[1].transpose(0, 1)" in text
    assert "unflatten" not in text


def test_tables_go_into_replicate():
    assert "mgpu_core.Replicate(...)" in message(numbers(4, 2), numbers(5, 3))


def told(call, count=3):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(count):
            call()
    return [str(each.message) for each in found]


class Gru(nn.Module):
    """Returns a state of (layers, rows, width), as recurrent layers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x):
        return self.layer(x[:, -1]).unsqueeze(0)


@pytest.mark.parametrize("rows", [4, 5])
def test_outputs_whose_rows_are_elsewhere_are_told_of_once(rows):
    net = Gru().to(cpu(1)[0])
    model, x = DataParallel(net, cpu(2)), numbers(rows, 3, 4)
    texts = []

    def call():
        try:
            model(x)
        except ValueError:  # uneven rows do not fit
            texts.append("uneven")

    found = told(call)
    assert texts == ["uneven"] * (3 * (rows % 2))
    (text,) = [each for each in found if "their rows seem to be along dimension 1" in each]
    assert "Return output.transpose(0, 1)" in text


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_the_state_of_a_recurrent_layer_beside_its_outputs(kind):
    with torch.device("cpu"):  # the fakes have no cells
        net = kind(3, 7, batch_first=True)
        found = told(lambda: DataParallel(net, ["cpu"] * 2)(torch.randn(8, 5, 3)), count=1)
    assert [each for each in found if "have shapes (1, 4, 7) and (1, 4, 7): their rows seem to be" in each]


def test_outputs_of_a_step_too():
    net = Gru().to(cpu(1)[0])
    step = TrainStep(net, lambda o, y: o.mean(), torch.optim.SGD(net.parameters(), 0.0), cpu(2))
    x = numbers(4, 3, 4)
    found = told(lambda: step(x, x, return_outputs=True))
    assert len([each for each in found if "their rows seem to be along dimension 1" in each]) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: self.linear(x),
        lambda self, x: (self.linear(x), x.sum(0)),
        lambda self, x: (self.linear(x), x.new_ones(1, 2)),
        lambda self, x: x.mean(0, keepdim=True),
        lambda self, x: (x @ x.T).mean(1),
    ],
)
def test_no_false_alarm_for_outputs(function):
    model = DataParallel(Lambda(function), cpu(2))
    assert [each for each in told(lambda: model(numbers(6, 2))) if "their rows seem" in each] == []


class Held:
    def __init__(self, lengths):
        self.inner = type("Inner", (), {})()
        self.inner.lengths = lengths

    def method(self):
        return self.inner


class Slotted:
    __slots__ = ("lengths",)

    def __init__(self, lengths):
        self.lengths = lengths


LENGTHS = list(range(12))
UNCUT = {
    "list": lambda: LENGTHS,
    "tuple": lambda: tuple(LENGTHS),
    "array": lambda: np.arange(12),
    "closure": lambda: (lambda lengths: lambda: lengths)(torch.arange(12)),
    "partial": lambda: functools.partial(max, LENGTHS),
    "default": lambda: lambda lengths=tuple(LENGTHS): lengths,
    "set": lambda: set(LENGTHS),
    "list in a list": lambda: [LENGTHS],
    "object in a list": lambda: [Held(LENGTHS)],
    "slots": lambda: Slotted(LENGTHS),
    "object in an object": lambda: Held(LENGTHS),
    "method": lambda: Held(torch.arange(12)).method,
}


@pytest.mark.parametrize("kind", UNCUT)
def test_arguments_with_an_entry_per_row_that_were_not_cut_are_told_of_once(kind):
    model = DataParallel(Lambda(lambda self, x, **kwargs: self.linear(x)), cpu(2))
    name, value = f"of_{kind.replace(' ', '_')}", UNCUT[kind]()
    (text,) = told(lambda: model(numbers(12, 2), **{name: value}))
    assert f"kwargs['{name}'] is a " in text
    assert "12 entries, as many as there are rows" in text
    assert "mgpu_core.Rows(...)" in text


@pytest.mark.parametrize(
    "value",
    [
        LENGTHS[:-1],
        "a text of 12",
        (1, 2, 3),
        None,
        {"sizes": [1, 2]},
        Rows(LENGTHS),
        Replicate(LENGTHS),
        nn.Linear(1, 12),
        print,
        functools.partial(F.pad, pad=(1, 1)),
    ],
)
def test_no_false_alarm_for_arguments(value):
    model = DataParallel(Lambda(lambda self, x, value: self.linear(x)), cpu(2))
    assert told(lambda: model(numbers(12, 2), value)) == []


class Forgetful:
    """A cache whose constructor makes copies of nothing: what it is made of is not in it."""

    def __init__(self, items=()):
        self.items = list(items) if isinstance(items, list) else []

    def __iter__(self):
        return iter(self.items)


class Copying(Forgetful):
    """A cache that keeps copies."""

    def __init__(self, items=()):
        self.items = [each.clone() for each in items]


def test_a_container_that_comes_back_empty_is_a_list_of_its_items():
    parts = [Forgetful([torch.full((2, 1), float(rank)), torch.ones(2, 3)]) for rank in range(2)]
    with pytest.warns(UserWarning, match="outputs is a Forgetful, which does not hold what it is made of"):
        found = gather(parts, cpu(1)[0])
    assert type(found) is list
    assert found[0].flatten().tolist() == [0, 0, 1, 1]
    assert found[1].shape == (4, 3)


def test_a_container_that_copies_its_items_is_made_again():
    found = gather([Copying([torch.ones(2, 1)]), Copying([torch.zeros(1, 1)])], cpu(1)[0])
    assert type(found) is Copying
    assert found.items[0].flatten().tolist() == [1, 1, 0]
