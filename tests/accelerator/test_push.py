"""All-reduces by push from Python, on the fake CUDA runtime; `tests/cpp/test_push.cpp` has the rest."""

import ctypes

import pytest
import torch
from torch import nn
from torch.nn import functional

from mgpu_core import TrainStep, _core, comm
from mgpu_core.devices.push_teams import with_push
from mgpu_core.devices.streams import core_streams
from mgpu_core.errors import BackendUnavailable, Error

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]


def devices(*indices):
    return [torch.device("fake", index) for index in indices]


def inputs(team, count, dtype):
    torch.manual_seed(count)
    return [(torch.randn(count) * 9).to(dtype).to(device) for device in team]


def reduced(parts, algorithm, op="sum"):
    parts = [part.clone() for part in parts]
    comm.all_reduce(parts, op, algorithm=algorithm)
    return torch.stack([part.cpu() for part in parts])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("team", [devices(0, 1), devices(2, 0, 3, 1)], ids=len)
def test_it_has_the_bits_of_direct(team, dtype):
    for count in (0, 1, 1000, 70_001):  # the last in several launches
        for op in ("sum", "avg", "prod", "min", "max"):
            parts = inputs(team, count, dtype)
            assert torch.equal(reduced(parts, "push", op), reduced(parts, "direct", op))


def test_it_is_counted_and_refused_where_it_cannot_be():
    parts = inputs(devices(0, 1), 8, torch.float32)
    _core.reset_counters()
    comm.all_reduce(parts, algorithm="push")
    assert _core.counters() == {("all_reduce", "push", rank): (1, 32) for rank in range(2)}
    shared = inputs(devices(1, 1), 8, torch.float32)
    kept = [part.cpu() for part in shared]
    with pytest.raises(BackendUnavailable, match="a stream for each rank"):
        comm.all_reduce(shared, algorithm="push")
    with pytest.raises(BackendUnavailable, match="push works between GPUs"):
        comm.all_reduce(kept, algorithm="push")
    assert all(torch.equal(part.cpu(), before) for part, before in zip(shared, kept, strict=True))
    comm.all_reduce(parts, algorithm="push")  # and the others go on


def test_launches_that_wait_for_their_kernels(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(BackendUnavailable, match="unset CUDA_LAUNCH_BLOCKING"):
        comm.all_reduce(inputs(devices(0, 1), 8, torch.float32), algorithm="push")


def test_a_limit_that_is_none(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_NCCL_TIMEOUT", "soon")
    parts = inputs(devices(0, 1), 8, torch.float32)
    with pytest.raises(ValueError, match="MGPU_CORE_NCCL_TIMEOUT must be a positive number of seconds"):
        comm.all_reduce(parts, algorithm="push")


def test_a_team_that_failed_is_made_anew():
    parts = inputs(devices(0, 1), 8, torch.float32)
    invalid_value, after_one_rank = 1, 1
    ctypes.CDLL(_core.__file__).fakeCudaFail(b"cudaLaunchKernel", invalid_value, after_one_rank)
    spoilt = [part.clone() for part in parts]  # they live on: one rank's kernel has started
    with pytest.raises(Error, match="push_sum_kernel"):
        comm.all_reduce(spoilt, algorithm="push")
    total = parts[0].cpu() + parts[1].cpu()
    assert torch.equal(reduced(parts, "push"), torch.stack([total, total]))
    assert spoilt[0].isnan().all()


def test_a_team_lives_on_after_a_call_that_started_nothing():
    streams, teams = core_streams(devices(0, 1)), []

    def refuse(team):
        teams.append(team)
        raise Error("nothing was started")

    with pytest.raises(Error, match="nothing was started"):
        with_push(streams, refuse)
    with_push(streams, teams.append)
    assert teams[0] is teams[1]


@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_a_step_has_the_bits_of_direct(workers):
    weights = []
    for algorithm in ("push", "direct"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).to("fake:0")
        optimizer = torch.optim.AdamW(net.parameters())
        step = TrainStep(
            net, functional.cross_entropy, optimizer, device_ids=devices(0, 1, 2), algorithm=algorithm, workers=workers
        )
        for _ in range(5):
            step(torch.randn(9, 7), torch.randint(3, (9,)))
        weights.append([parameter.detach().cpu() for parameter in net.parameters()])
        step.close()
    assert all(torch.equal(pushed, summed) for pushed, summed in zip(*weights, strict=True))
