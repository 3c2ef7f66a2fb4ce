"""Scatter, replicate, apply, gather and reduce, each by itself, on fake devices and mixed teams."""

import threading

import pytest
import torch
from fakes.accelerator import TEAMS, fakes
from fakes.nets import Embedded, Polynomial, chunks, whole
from fakes.tensors import devices_of, numbers
from torch import nn

from mgpu_core import Replicate, _core, gather, parallel_apply, reduce, replicate, scatter

every_team = pytest.mark.parametrize("team", TEAMS, ids="-".join)


@every_team
@pytest.mark.parametrize("source", ["fake:0", "fake:3", "cpu"])
@pytest.mark.parametrize("rows", [1, 2, 9, 16])
def test_scatter_there_and_back(team, source, rows):
    x = numbers(rows, 2, device=source).requires_grad_()
    parts = scatter(x, team)
    assert [len(part) for part in parts] == chunks(rows, len(team))
    assert devices_of(parts) == team[:rows]
    whole = gather([part * (rank + 1) for rank, part in enumerate(parts)], source)
    assert str(whole.device) == source
    factors = [rank + 1 for rank, part in enumerate(parts) for _ in part]
    assert whole.tolist() == [[a * factor, b * factor] for (a, b), factor in zip(x.tolist(), factors, strict=True)]
    whole.sum().backward()
    assert x.grad.tolist() == [[factor] * 2 for factor in factors]


@every_team
def test_scatter_of_a_nest(team):
    x, scale = numbers(16, 2), torch.tensor(3.0, device="fake:2", requires_grad=True)
    table = numbers(5, device="cpu").requires_grad_()
    parts = scatter({"x": [x], "scale": scale, "table": Replicate(table), "name": "n"}, team)
    for rank, (part, device) in enumerate(zip(parts, team, strict=True)):
        assert part["name"] == "n"
        assert devices_of([part["x"][0], part["scale"], part["table"]]) == [device] * 3
        assert part["x"][0].tolist() == x.tensor_split(len(team))[rank].tolist()
        assert part["table"].tolist() == table.tolist()
    sum((part["scale"] * part["table"].sum()).cpu() for part in parts).backward()
    assert scale.grad.item() == table.sum().item() * len(team)
    assert table.grad.tolist() == [3 * len(team)] * 5


@every_team
def test_scatter_of_nothing_and_by_shares(team):
    (empty,) = scatter(numbers(0, 2), team)
    assert (empty.shape, str(empty.device)) == ((0, 2), team[0])
    shares = list(range(1, len(team) + 1))
    parts = scatter(numbers(sum(shares), 1), team, shares=shares)
    assert [len(part) for part in parts] == shares
    assert devices_of(parts) == team


@every_team
def test_replicas_are_on_their_devices(team):
    net = nn.Sequential(whole(nn.Linear(2, 2)), nn.BatchNorm1d(2)).to(team[0])
    replicas = replicate(net, team)
    for rank, (replica, device) in enumerate(zip(replicas, team, strict=True)):
        linear, norm = replica
        tensors = [linear.weight, linear.bias, norm.weight, norm.running_mean, norm.num_batches_tracked]
        assert devices_of(tensors) == [device] * 5
        own = [net[0].weight, net[0].bias, net[1].weight, net[1].running_mean, net[1].num_batches_tracked]
        assert [t.tolist() for t in tensors] == [t.tolist() for t in own]
        assert {one.data_ptr() == other.data_ptr() for one, other in zip(tensors, own, strict=True)} == {rank == 0}


@every_team
def test_gradients_of_replicas_are_added_up_in_the_module(team):
    net = Polynomial().to(team[0])
    for rank, replica in enumerate(replicate(net, team)):
        (replica.last.bias.sum() * (rank + 1)).cpu().backward(retain_graph=True)
    assert str(net.last.bias.grad.device) == team[0]
    assert net.last.bias.grad.tolist() == [sum(range(len(team) + 1))] * 2
    assert net.first.weight.grad is None


class Where(nn.Module):
    def forward(self, rank):
        device = torch.accelerator.current_device_index()
        return rank, device, torch.accelerator.current_stream(), torch.ones(2, device="fake").device


def test_each_rank_runs_on_its_device_and_on_the_callers_stream():
    team = fakes(8)
    before = [torch.accelerator.current_stream(device) for device in fakes(4)]
    streams = [torch.Stream(device) for device in fakes(4)]
    try:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(0)
        found = parallel_apply([Where()] * 8, [(rank,) for rank in range(8)], None, team)
    finally:
        for stream in reversed(before):  # the device of the last one becomes the current one
            torch.accelerator.set_stream(stream)
    assert [rank for rank, *_ in found] == list(range(8))
    assert [f"fake:{index}" for _, index, _, _ in found] == team
    assert [str(device) for _, _, _, device in found] == team
    assert [stream for *_, stream, _ in found] == streams * 2
    assert torch.accelerator.current_device_index() == 0


def test_one_rank_runs_on_its_device_too_and_leaves_the_callers():
    ((_, index, _, device),) = parallel_apply([Where()], [(0,)], None, ["fake:3"])
    assert (index, str(device)) == (3, "fake:3")
    assert torch.accelerator.current_device_index() == 0


class Fails(nn.Module):
    def forward(self, x):
        if str(x.device) != "fake:0":
            raise KeyError(threading.current_thread().name)
        return x


def test_failures_name_their_devices():
    team = ["fake:0", "cpu", "fake:3"]
    inputs = [torch.ones(1, device=device) for device in team]
    with pytest.raises(KeyError) as caught:
        parallel_apply([Fails()] * 3, inputs)
    assert str(caught.value).startswith("Caught KeyError in replica 1 on device cpu.\nOriginal Traceback")
    (note,) = caught.value.__notes__
    assert note.startswith("also in replica 2 on device fake:3: KeyError(")


@every_team
@pytest.mark.parametrize("target", ["cpu", "fake:0", "fake:3", 1])
def test_gather_of_a_nest(team, target):
    outputs = [{"y": (torch.full((rank + 1, 2), rank, device=d), "same")} for rank, d in enumerate(team)]
    joined, text = gather(outputs, target)["y"]
    assert joined.device == torch.device(f"fake:{target}" if target == 1 else target)
    assert joined.tolist() == [[rank, rank] for rank in range(len(team)) for _ in range(rank + 1)]
    assert text == "same"


@every_team
def test_scalar_losses_become_a_vector(team):
    losses = [torch.tensor(float(rank), device=device, requires_grad=True) for rank, device in enumerate(team)]
    with pytest.warns(UserWarning, match="will instead unsqueeze and return a vector"):
        vector = gather(losses, team[-1])
    assert vector.tolist() == list(range(len(team)))
    vector.sum().backward()
    assert [(loss.grad.item(), str(loss.grad.device)) for loss in losses] == [(1, device) for device in team]


@every_team
@pytest.mark.parametrize("target", ["cpu", "fake:0", "fake:3"])
def test_reduce(team, target):
    terms = [torch.full((3,), rank + 1.0, device=device, requires_grad=True) for rank, device in enumerate(team)]
    _core.reset_counters()
    total = reduce([{"loss": term} for term in terms], target)["loss"]
    assert (total.tolist(), str(total.device)) == ([sum(range(len(team) + 1))] * 3, target)
    assert _core.counters() == {("reduce", "generic", rank): (1, 12) for rank in range(len(team))}
    (total * torch.arange(3.0, device=target)).sum().backward()
    assert [(term.grad.tolist(), str(term.grad.device)) for term in terms] == [([0, 1, 2], device) for device in team]


@every_team
def test_sparse_gradients_are_added_up_sparse(team):
    net = Embedded(sparse=True).to(team[0])
    replicas = replicate(net, team)
    for replica, device in zip(replicas, team, strict=True):
        replica(torch.tensor([1, 1, 4], device=device)).sum().cpu().backward(retain_graph=True)
    grad = net.embedding.weight.grad
    assert (grad.layout, str(grad.device)) == (torch.sparse_coo, team[0])
    assert grad.to_dense().tolist() == [[factor * len(team)] * 3 for factor in (0, 2, 0, 0, 1, 0)]
