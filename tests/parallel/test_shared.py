"""What ranks share beside tensors, and change once per rank, is told of once: containers, objects, what hooks hold."""

import warnings
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import DataParallel, TrainStep

pytestmark = pytest.mark.several_ranks


class Keeps(nn.Module):
    """Changes something of its own in each forward, or nothing."""

    def __init__(self, kept, change):
        super().__init__()
        self.layer, self.change = nn.Linear(2, 2), change
        self.layer.kept = kept

    def forward(self, x):
        self.change(self.layer.kept)
        return self.layer(x)


def add(kept):
    kept["calls"] += 1


KEPT = {
    "a dict": (lambda: {"calls": 0}, add),
    "a list": (list, lambda kept: kept.append(0)),
    "a deque": (lambda: deque([0] * 40, maxlen=40), lambda kept: kept.append(len(kept) + kept[-1])),
    "an object": (lambda: SimpleNamespace(calls=0), lambda kept: kept.__dict__.__setitem__("calls", kept.calls + 1)),
    "an object in a dict": (
        lambda: {"state": SimpleNamespace(calls=0)},
        lambda kept: kept["state"].__dict__.__setitem__("calls", kept["state"].calls + 1),
    ),
    "a tensor in a list": (lambda: [torch.zeros(2, device=cpu(1)[0])], lambda kept: kept[0].add_(1)),
    "a set": (set, lambda kept: kept.add(len(kept))),
}


def told_of(call, times=4):
    with warnings.catch_warnings(record=True, action="always") as found:
        for _ in range(times):
            call()
    return [str(each.message) for each in found if "all ranks share it" in str(each.message)]


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_what_each_rank_changes_is_told_of_once(name, workers, ranks):
    made, change = KEPT[name]
    model = DataParallel(Keeps(made(), change).to(cpu(1)[0]), cpu(1) * ranks, workers=workers)
    x = torch.ones(2 * ranks, 2, device=cpu(1)[0])
    (text,) = told_of(lambda: model(x))
    assert f"the forward of Keeps changes layer.kept: all ranks share it, and change it {ranks} times a call" in text


@pytest.mark.parametrize("name", KEPT)
def test_in_a_step_too(name, ranks):
    made, change = KEPT[name]
    net = Keeps(made(), change).to(cpu(1)[0])
    step = TrainStep(
        net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), cpu(1) * ranks, workers="caller"
    )
    x = torch.ones(2 * ranks, 2, device=cpu(1)[0])
    (text,) = told_of(lambda: step(x, x))
    assert "layer.kept" in text


def test_what_a_hook_fills_is_named_with_its_layer(ranks):
    features = {}
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to(cpu(1)[0])
    net[0].register_forward_hook(lambda module, args, out: features.__setitem__("first", out.detach()))
    model = DataParallel(net, cpu(ranks))
    (text,) = told_of(lambda: model(torch.ones(2 * ranks, 2, device=cpu(1)[0])))
    assert "features of a hook on 0" in text


@pytest.mark.parametrize("name", KEPT)
def test_what_nobody_changes_is_not_told_of(name, ranks):
    model = DataParallel(Keeps(KEPT[name][0](), lambda kept: None).to(cpu(1)[0]), cpu(ranks))
    assert told_of(lambda: model(torch.ones(2 * ranks, 2, device=cpu(1)[0]))) == []


def test_objects_that_hold_themselves_and_many_entries_are_looked_at_in_no_time(ranks):
    kept = SimpleNamespace(many=list(range(10**6)), deep={})
    kept.itself = kept
    inner = kept.deep
    for _ in range(1000):
        inner["next"] = {}
        inner = inner["next"]
    model = DataParallel(Keeps(kept, lambda kept: None).to(cpu(1)[0]), cpu(ranks))
    assert told_of(lambda: model(torch.ones(2 * ranks, 2, device=cpu(1)[0]))) == []


def test_a_list_that_the_loss_of_the_rank_empties_is_right(ranks):
    """As layers that add auxiliary losses to a list do: each rank's loss takes its own."""
    net = Keeps([], lambda kept: kept.append(1.0)).to(cpu(1)[0])

    def loss_fn(out, y):
        return out.square().mean() + net.layer.kept.pop()

    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), cpu(1) * ranks, workers="caller")
    x = torch.ones(2 * ranks, 2, device=cpu(1)[0])
    assert told_of(lambda: step(x, x)) == []


def test_a_cache_that_is_filled_and_a_setting_that_is_made_once_are_not_told_of(ranks):
    cache = Keeps({}, lambda kept: kept.setdefault("mask", torch.ones(2)))
    setting = Keeps(SimpleNamespace(kind=None), lambda kept: setattr(kept, "kind", "regression"))
    for net in (cache, setting):
        model = DataParallel(net.to(cpu(1)[0]), cpu(ranks))
        assert told_of(lambda model=model: model(torch.ones(2 * ranks, 2, device=cpu(1)[0]))) == []
