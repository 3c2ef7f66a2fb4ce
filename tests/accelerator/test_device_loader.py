"""``DeviceLoader`` on several devices: each rank's rows are on its device before the step."""

import pytest
import torch
from fakes.tensors import numbers
from torch import nn
from train.nets import mse

from mgpu_core import DataParallel, DeviceLoader, Rows, TrainStep

TEAMS = [["fake:0", "fake:1"], ["fake:0", "fake:1", "fake:0"], ["fake:1", "cpu", "fake:2"]]
every_team = pytest.mark.parametrize("team", TEAMS, ids="-".join)


def batches(count, rows):
    return [(numbers(rows, 3, device="cpu") + i, numbers(rows, 2, device="cpu") - i) for i in range(count)]


@every_team
def test_parts_are_on_their_devices(team):
    for x, y in DeviceLoader(batches(3, 7), team):
        assert [str(part.device) for part in x.parts] == team
        assert [len(part) for part in y.parts] == x.counts
        assert sum(x.counts) == 7
        assert str(x.joined().device) == team[0]


@every_team
@pytest.mark.parametrize("shares", [None, "uneven"])
def test_training_equals_that_from_the_plain_loader(team, shares):
    shares = None if shares is None else list(range(1, len(team) + 1))
    losses = []
    for loader in (batches(4, 9), DeviceLoader(batches(4, 9), team, shares=shares)):
        net = nn.Linear(3, 2).to(team[0])
        nn.init.constant_(net.weight, 0.5), nn.init.zeros_(net.bias)
        step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.125), team, shares=shares)
        losses.append([step(x, y).item() for x, y in loader])
    assert losses[0] == losses[1]


@every_team
def test_the_loop_of_the_drop_in(team):
    net = nn.Linear(3, 2).to(team[0])
    model = DataParallel(net, team)
    for (x, y), (plain_x, plain_y) in zip(DeviceLoader(batches(2, 5), team), batches(2, 5), strict=True):
        loss = mse(model(x), y)
        wanted = mse(net(plain_x.to(team[0])), plain_y.to(team[0]))
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


@every_team
def test_entries_of_rows_are_on_their_devices(team):
    rows = Rows([torch.ones(i + 1) for i in range(6)])
    (split,) = DeviceLoader([{"boxes": rows}], team)
    assert [{str(each.device) for each in part} for part in split["boxes"].parts] == [{name} for name in team]
    assert [len(each) for each in split["boxes"].joined()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_of_one_device_get_whole_tensors_there(ranks):
    ((x, _),) = DeviceLoader(batches(1, 5), ["fake:1"] * ranks)
    assert (type(x), str(x.device), len(x)) == (torch.Tensor, "fake:1", 5)


def test_all_devices_by_default():
    ((x, _),) = DeviceLoader(batches(1, 8))
    assert [str(part.device) for part in x.parts] == [f"fake:{i}" for i in range(torch.accelerator.device_count())]


def test_devices_of_another_order_are_refused():
    ((x, _),) = DeviceLoader(batches(1, 4), ["fake:1", "fake:0"])
    with pytest.raises(ValueError, match="split for other ranks"):
        DataParallel(nn.Identity(), ["fake:0", "fake:1"])(x)
