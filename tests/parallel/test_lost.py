"""Attributes that a forward assigns are lost, and said to be, once."""

import gc
import warnings
import weakref

import pytest
import torch

import mgpu_core
from mgpu_core.parallel.first_calls.lost import given_attributes, lost_attributes


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        self.inner.last = x
        return self.inner(x)


def test_warned_once_and_lost():
    module = Counting()
    model = mgpu_core.DataParallel(module, ["cpu"] * 2)
    with pytest.warns(UserWarning, match=r"Counting assigns steps, inner\.last"):
        model(torch.zeros(4, 2))
    assert module.steps == 0
    assert not hasattr(module.inner, "last")
    with warnings.catch_warnings(action="error"):
        model(torch.zeros(4, 2))


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)),
        torch.nn.utils.weight_norm(torch.nn.Linear(2, 3)),
        torch.nn.utils.spectral_norm(torch.nn.Linear(2, 3)),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 3)),
        torch.nn.LSTM(2, 3),
        torch.nn.TransformerEncoderLayer(2, 1, 4),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_modules_of_torch_lose_nothing(module):
    replica = mgpu_core.replicate(module, ["cpu"] * 2)[0]
    given = given_attributes(replica)
    replica(torch.zeros(4, 4, 2)) if not isinstance(module, torch.nn.Sequential) else replica(torch.zeros(4, 2))
    assert lost_attributes(given) == []


def lost_warnings(model, x):
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(4):
            model(x)
    return [str(each.message) for each in caught if "is lost" in str(each.message)]


class Numbered(mgpu_core.DataParallel):
    """As wrappers of synchronised layers do: each replica is told its number."""

    def replicate(self, module, device_ids):
        replicas = super().replicate(module, device_ids)
        for number, replica in enumerate(replicas):
            for each in replica.modules():
                each._id = number
        return replicas


def test_what_an_own_replicate_gives_is_not_lost():
    assert lost_warnings(Numbered(torch.nn.Linear(2, 2), ["cpu"] * 2), torch.zeros(4, 2)) == []


class Master(torch.nn.Module):
    """Keeps its statistics in the original, which its replicas know by a closure."""

    def __init__(self):
        super().__init__()
        self.running = torch.zeros(2)
        self.count = 0
        self.inner = torch.nn.Linear(2, 2)
        original = self

        def update(x):
            original.running = original.running + x.mean(0)
            original.count += 1

        self.update = update

    def forward(self, x):
        self.update(x)
        return self.inner(x)


def test_what_changes_in_the_original_meanwhile_is_not_lost():
    module = Master()
    assert lost_warnings(mgpu_core.DataParallel(module, ["cpu"] * 2), torch.ones(4, 2)) == []
    assert module.count == 8


def test_five_are_named_and_the_others_counted():
    class Many(torch.nn.Module):
        def forward(self, x):
            for number in range(68):
                setattr(self, f"a{number}", number)
            return x

    (text,) = lost_warnings(mgpu_core.DataParallel(Many(), ["cpu"] * 2), torch.ones(4, 2))
    assert "the forward of Many assigns a0, a1, a2, a3, a4 and 63 more: with several ranks" in text


class Appends(torch.nn.Linear):
    """Appends to a list that all ranks share, once calls no longer fail; returns its loss where labels are given."""

    def __init__(self):
        super().__init__(2, 2)
        self.seen, self.failures = [], 3

    def forward(self, x, labels=None):
        if self.failures and len(x) > 1:
            raise ValueError("not yet")
        if labels is not None:
            return torch.nn.functional.cross_entropy(super().forward(x), labels)
        self.seen.append(1)
        return super().forward(x)


def test_calls_that_fail_are_not_among_the_first():
    module = Appends()
    model = mgpu_core.DataParallel(module, ["cpu"] * 2)
    for _ in range(3):
        with pytest.raises(ValueError, match="not yet"):
            model(torch.ones(4, 2))
    module.failures = 0
    model(torch.ones(4, 2))
    with pytest.warns(UserWarning, match="the forward of Appends changes seen: all ranks share it"):
        model(torch.ones(4, 2))


def test_calls_of_one_rank_and_of_methods_do_not_count_for_labels():
    module = Appends()
    module.failures = 0
    model = mgpu_core.DataParallel(module, ["cpu"] * 2)
    x, labels = torch.ones(4, 2), torch.tensor([0, -100, 1, 1])
    with warnings.catch_warnings(action="ignore"):
        for _ in range(9):
            model(x[:1], labels=labels[:1])
            model.call("extra_repr")
    with pytest.warns(UserWarning, match="the ranks have 1, 2 labels other than -100 in 2, 2 rows"):
        model(x, labels=labels)


def test_a_module_that_takes_the_others_place_is_looked_at_and_the_other_is_let_go():
    model = mgpu_core.DataParallel(Counting(), ["cpu"] * 2)
    other, before = Appends(), weakref.ref(model.module)
    other.failures = 0
    model.module = other
    model(torch.ones(4, 2))
    with pytest.warns(UserWarning, match="the forward of Appends changes seen"):
        model(torch.ones(4, 2))
    gc.collect()
    assert before() is None
