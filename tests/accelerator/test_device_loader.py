"""``DeviceLoader`` on several devices: each rank's rows are on its device before the step."""

import pytest
import torch
from fakes.accelerator import device_module
from fakes.as_gpus import gpus, id_of, waits  # noqa: F401
from fakes.tensors import numbers
from step.nets import mse
from torch import nn

from mgpu_core import DataParallel, DeviceLoader, Rows, TrainStep
from mgpu_core.devices import streams
from mgpu_core.trees.nested import RankParts

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


@pytest.fixture
def pinned(monkeypatch, gpus):  # noqa: F811
    """Let the fakes be the GPUs of the loader, and return the tensors that are pinned."""
    seen = []
    monkeypatch.setattr("mgpu_core.data.device_loader.GPU_TYPE", "fake")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: seen.append(tensor) or tensor)
    return seen


def has_waited(waiter, awaited):
    return (id_of(waiter), id_of(awaited)) in waits()


@pytest.mark.parametrize("team", [["fake:0", "fake:1"], ["cpu", "fake:1"], ["fake:1", "fake:1"]], ids="-".join)
def test_copies_to_gpus_are_pinned_and_on_side_streams(team, pinned):
    own, side = torch.Stream("fake:1"), streams.own_stream("copies", 1)
    with own:
        loader = iter(DeviceLoader(batches(2, 4), team))
        before = has_waited(own, side)
        device_module.built.take_recorded()
        x, _ = next(loader)
        part = x.parts[1] if isinstance(x, RankParts) else x
        assert (before, has_waited(own, side)) == (False, True)
        assert (part.data_ptr(), own.stream_id) in device_module.built.take_recorded()
        assert torch.accelerator.current_stream("fake:1") == own
    assert len(pinned) == 4  # two tensors of two batches: one batch is ahead
    assert {each.device.type for each in pinned} == {"cpu"}


@pytest.mark.parametrize("team", [["fake:0", "fake:1"], ["fake:1"]], ids="-".join)
def test_copies_wait_for_who_made_the_batches_on_a_gpu(team, pinned):
    own, side, sources = torch.Stream("fake:0"), streams.own_stream("copies", 0), []

    def made_there():
        for number in range(2):
            sources.append(torch.full((4, 3), float(number), device="fake:0"))
            yield sources[-1]

    class Made:
        def __iter__(self):
            return made_there()

    device_module.built.take_recorded()
    waits()
    with streams.on(torch.device("fake:0"), own):
        list(DeviceLoader(Made(), team))
    assert has_waited(side, own)
    recorded = device_module.built.take_recorded()
    assert all((each.data_ptr(), side.stream_id) in recorded for each in sources)
    assert pinned == []


def test_only_tensors_on_the_host_are_pinned(pinned):
    batch = [numbers(4, 3, device="fake:0"), "text", numbers(4, 1, device="cpu")]
    ((_, text, _),) = DeviceLoader([batch], ["fake:0", "fake:1"])
    assert text == "text"
    assert [each is batch[2] for each in pinned] == [True]


def test_the_cpu_needs_no_pinned_memory(pinned):
    list(DeviceLoader(batches(2, 4), ["cpu"] * 2))
    assert pinned == []


def test_tensors_that_stay_whole_are_copied_beside_the_computing(monkeypatch, pinned):
    seen = []

    def moved(leaf, device):
        seen.append(torch.accelerator.current_stream(device))
        return leaf

    monkeypatch.setattr("mgpu_core.data.device_loader._moved", moved)
    list(DeviceLoader(batches(1, 4), ["fake:1"]))
    assert seen == [streams.own_stream("copies", 1)] * 2
