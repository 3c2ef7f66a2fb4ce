"""Waits of the host, launches and memory: figures to look at, and bounds where the answer is known."""

import gc
import warnings
from pathlib import Path

import pytest
import torch
from fakes.here import OPTIMIZERS, optimizer_of
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import mgpu_core

pytestmark = pytest.mark.usefixtures("gpu_only")


def waits_of(work, steps=6, warm=14):
    """Return the waits a step, and the lines that wait; torch's synchronisation warnings name them."""
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True, action="always") as found:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The switch itself warns once that it is a prototype.
    waits = [each for each in found if "called a synchronizing" in str(each.message)]
    lines = [f"{Path(each.filename).name}:{each.lineno}" for each in waits]
    return round(len(lines) / steps, 1), sorted(set(lines))[:4]


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_waits_for_nothing(here, name, ranks, capture):
    """With a scheduler, clipping and running statistics."""
    net = here.net(dtype=torch.float32, norm=True)
    optimizer = optimizer_of(name, net.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    step = mgpu_core.TrainStep(
        net, functional.cross_entropy, optimizer, here.team(ranks), clip_norm=1.0, capture=capture
    )
    ((x, y),) = here.batches(1, dtype=torch.float32)

    def work():
        step(x, y)
        schedule.step()

    found = waits_of(work)
    here.figures[f"waits a step, {name}, {ranks} ranks{', captured' if capture else ''}"] = found
    assert found[0] == 0


def test_waits_of_other_parts(here):
    ((x, y),) = here.batches(1, dtype=torch.float32)
    model = mgpu_core.DataParallel(here.net(dtype=torch.float32), here.team(2))
    pipe = mgpu_core.Pipeline(here.net(dtype=torch.float32), here.team(2), split_points=["5"], chunks=4)
    step = mgpu_core.TrainStep(pipe, functional.cross_entropy, optimizer_of("adamw", pipe.parameters()))
    mlp = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3)).to(here.device)
    cut = mgpu_core.TensorParallel(mlp, here.team(2), {"0": "column", "2": "row"})
    here.figures["waits, DataParallel"] = waits_of(lambda: functional.cross_entropy(model(x), y).backward())
    here.figures["waits, Pipeline"] = waits_of(lambda: step(x, y))
    here.figures["waits, TensorParallel"] = waits_of(lambda: cut(x).sum().backward())


def deep(device):
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(20, 64)]
    for _ in range(30):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 3)).to(device)


def launches_of(work):
    for _ in range(12):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(each.count for each in profiler.key_averages() if "CUDA" in str(each.device_type))


def test_launches_of_a_step(here):
    """Next to a bare loop with torch's fused AdamW, of a net with thirty BatchNorms."""
    ((x, y),) = here.batches(1, dtype=torch.float32)
    net = deep(here.device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def bare():
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    here.figures["launches, bare"] = launches_of(bare)
    for ranks in (1, 2):
        other = deep(here.device)
        optimizer_of_ours = optimizer_of("adamw", other.parameters())
        step = mgpu_core.TrainStep(other, functional.cross_entropy, optimizer_of_ours, here.team(ranks))
        here.figures[f"launches, TrainStep, {ranks} ranks"] = launches_of(lambda step=step: step(x, y))


def test_a_recording_next_to_a_loss_that_is_kept(here):
    """It may fail as long as the graph over the same parameters is kept, and is made afterwards."""
    net = here.net()
    ((x, y),) = here.batches(1)
    kept = functional.cross_entropy(net(x), y)
    step = mgpu_core.TrainStep(
        net, functional.cross_entropy, optimizer_of("sgd", net.parameters()), here.team(1), capture=True
    )
    with warnings.catch_warnings(action="ignore"):
        for _ in range(8):
            step(x, y)
        here.figures["next to a kept loss"] = f"{step.graphs.replays} replays; {step.graphs.reason}"
        del kept
        for _ in range(40):
            step(x, y)
    assert step.graphs.replays > 15, step.graphs.reason


class Large(nn.Module):
    """Waits for the GPU at its end, which a recording cannot."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x):
        for _ in range(8):
            x = self.layer(x).tanh()
        return x if float(x.sum()) < 1e30 else -x


def reserved_mib():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() >> 20


def test_a_recording_that_failed_keeps_no_memory(here):
    torch.ones(8, 8, device=here.device).matmul(torch.ones(8, 8, device=here.device))  # the workspace of cuBLAS
    before = reserved_mib()
    net = Large().to(here.device)
    optimizer = optimizer_of("sgd", net.parameters())
    step = mgpu_core.TrainStep(net, functional.mse_loss, optimizer, here.team(1), capture=True)
    x = torch.randn(65536, 512, device=here.device)  # a step of it holds about 2 GiB
    with warnings.catch_warnings(action="ignore"):
        for _ in range(6):
            step(x, x)
    assert step.graphs.replays == 0
    step.close()
    del net, optimizer, step, x
    after = reserved_mib()
    here.figures["MiB reserved before and after a recording that failed"] = (before, after)
    assert after <= before + 200


def test_memory_is_flat(here):
    net = here.net(dtype=torch.float32)
    step = mgpu_core.TrainStep(
        net, functional.cross_entropy, optimizer_of("adamw", net.parameters()), here.team(2), workers="threads"
    )
    model = mgpu_core.DataParallel(here.net(dtype=torch.float32), here.team(2))
    data = list(here.batches(8, rows=512, dtype=torch.float32, where="cpu"))
    sizes = []
    for _ in range(5):
        for x, y in data * 5:
            step(x, y)
            model(x).sum().backward()
        torch.cuda.synchronize()
        sizes.append((torch.cuda.memory_allocated() >> 10, torch.cuda.memory_reserved() >> 20))
    here.figures["KiB allocated, MiB reserved"] = f"{sizes[0]} -> {sizes[-1]}"
    assert sizes[-1][0] <= sizes[1][0] + 64
    assert sizes[-1][1] <= sizes[1][1] + 2
