"""Ids of accelerators where there is none: the plain module for the drop-in, an error for everything else."""

import warnings

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core import DataParallel, TrainStep, comm, data_parallel
from mgpu_core.devices import devices

NAMED = [[0, 1], ["cuda:0"], [torch.device("cuda", 0), torch.device("cuda", 1)]]
pytestmark = pytest.mark.skipif(devices.has_accelerator(), reason="is about machines without an accelerator")


def caught(call):
    with warnings.catch_warnings(record=True, action="always") as found:
        result = call()
    return result, [str(each.message) for each in found]


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    monkeypatch.delenv("MGPU_CORE_CPU_RANKS", raising=False)


@pytest.mark.parametrize("ids", NAMED)
def test_the_drop_in_is_the_plain_module_with_one_warning(ids):
    net = nn.Linear(2, 1)
    x = torch.ones(4, 2)
    model, texts = caught(lambda: DataParallel(net, ids, output_device=ids[0]))
    out, more = caught(lambda: data_parallel(net, x, ids, output_device=ids[0]))
    assert (len(texts), len(more), model.device_ids) == (1, 1, [])
    assert all('["cpu"] * 2' in text for text in (*texts, *more))
    assert torch.equal(model(x), net(x))
    assert torch.equal(out, net(x))


def test_an_output_device_alone_is_warned_of_once():
    net = nn.Linear(2, 1)
    out, texts = caught(lambda: DataParallel(net, output_device=0)(torch.ones(4, 2)))
    assert torch.equal(out, net(torch.ones(4, 2)))
    assert (len(texts), '["cpu"] * 2' in texts[0]) == (1, True)
    _, texts = caught(lambda: data_parallel(net, torch.ones(4, 2), output_device="cuda:1"))
    assert len(texts) == 1
    with pytest.raises(ValueError, match="does not exist"):
        DataParallel(net, ["cpu"] * 2, output_device=0)


@pytest.mark.parametrize("ids", [[0, 1, 2], ["cuda:5"]])
def test_cpu_ranks_stand_in_where_they_are_asked_for(ids, monkeypatch):
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "7")
    rows = []

    class Counting(nn.Linear):
        def forward(self, x):
            rows.append(len(x))
            return super().forward(x)

    net = Counting(2, 1)
    model, texts = caught(lambda: DataParallel(net, ids, output_device=ids[-1]))
    model(torch.ones(6, 2))
    data_parallel(net, torch.ones(6, 2), ids)
    assert (texts, model.device_ids) == ([], [torch.device("cpu")] * len(ids))
    assert rows == [6 // len(ids)] * len(ids) * 2


def test_everything_else_refuses_them():
    net, x = nn.Linear(2, 1), torch.ones(4, 2)
    for call in (
        lambda: TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=1.0), [0, 1]),
        lambda: comm.broadcast(x, [0, 1]),
        lambda: comm.gather([x, x], destination=0),
        lambda: mgpu_core.scatter(x, ["cuda:0"]),
        lambda: mgpu_core.replicate(net, [0, 1]),
        lambda: mgpu_core.gather([x], 0),
        lambda: mgpu_core.Team.of([0]),
    ):
        with pytest.raises(ValueError, match=r'does not exist.*\["cpu"\] \* 2'):
            call()


@pytest.mark.parametrize("ids", [["cpu", 0], ["cuda:0", "cpu"], [-2], ["meta"], ["nonsense"]])
def test_what_is_no_list_of_accelerators_is_an_error(ids):
    with pytest.raises(ValueError, match=r"does not exist|0 or more|not a device"):
        DataParallel(nn.Linear(2, 1), ids)


def test_what_is_no_list_is_a_mistake():
    for ids in (0, "cuda:0", [True], [1.0]):
        with pytest.raises(TypeError):
            DataParallel(nn.Linear(2, 1), ids)
