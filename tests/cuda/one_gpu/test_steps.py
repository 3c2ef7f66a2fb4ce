"""TrainStep next to a bare loop: eager and captured, with ranks on the CPU, in half precision, in two threads."""

import copy
import threading

import pytest
import torch
from fakes.here import OPTIMIZERS, alike, in_threads, optimizer_of
from torch import nn
from torch.nn import functional

import mgpu_core

gpu_only = pytest.mark.usefixtures("gpu_only")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "workers"), [(1, "auto"), (2, "threads"), (2, "caller"), (4, "threads")])
def test_eager(here, ranks, workers, name):
    here.train_alike(here.team(ranks), name, workers=workers, steps=12, bucket_nbytes=1 << 16)


@gpu_only
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_captured(here, ranks, name):
    step = here.train_alike(here.team(ranks), name, capture=True, steps=16, each=here.poison, bucket_nbytes=1 << 16)
    assert step.graphs.replays >= 10, step.graphs.reason


@gpu_only
def test_captured_windows(here):
    """The graph of a first call sets the sums of its device, that of later ones adds to them."""
    nets = [here.net()]
    nets.append(copy.deepcopy(nets[0]))
    steps = [
        mgpu_core.TrainStep(
            net, functional.cross_entropy, optimizer_of("adamw", net.parameters()), here.team(1),
            accumulate=3, capture=net is nets[0],
        )
        for net in nets
    ]  # fmt: skip
    for x, y in here.batches(24):
        torch.testing.assert_close(*[step(x, y) for step in steps], rtol=0, atol=1e-9)
        here.poison()
    alike(nets[0], nets[1], 1e-8)
    assert steps[0].graphs.replays >= 12, steps[0].graphs.reason


@gpu_only
def test_beside_the_cpu(here):
    """Many buckets: hooks of two threads enter one side stream."""
    for _ in range(3):
        here.train_alike([here.name, "cpu"], steps=20, bucket_nbytes=1 << 13, workers="threads", where="cpu")


@gpu_only
def test_beside_the_cpu_on_late_streams(here):
    with here.late():
        here.train_alike([here.name, "cpu"], steps=20, bucket_nbytes=1 << 13, workers="threads", where="cpu")


@gpu_only
def test_two_captured_steps_in_two_threads(here):
    """One records at a time, and sums of the other one are not part of what it records."""
    told = []

    def work(index):
        step = here.train_alike(here.team(2), steps=60, capture=True, bucket_nbytes=1 << 14)
        told.append((step.graphs.replays, step.graphs.reason))

    in_threads(work, 2)
    assert all(replays > 40 for replays, _ in told), told


@gpu_only
@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(here, amp_dtype):
    """With a loss scale and clipping, eager and captured, one and two ranks: the losses agree."""
    found = []
    for team, capture in ((here.team(1), False), (here.team(1), True), (here.team(2), False), (here.team(2), True)):
        net = here.net(dtype=torch.float32)
        step = mgpu_core.TrainStep(
            net, functional.cross_entropy, optimizer_of("adamw", net.parameters()), team,
            amp_dtype=amp_dtype, capture=capture, clip_norm=1.0,
        )  # fmt: skip
        found.append(torch.stack([step(x, y) for x, y in here.batches(20, dtype=torch.float32)]).cpu())
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=3e-2)


def rows_of(here, index):
    generator = torch.Generator("cpu").manual_seed(index)
    rows = 1 << 15 if here.is_gpu else 1 << 6
    return tuple(torch.randn(rows, 64, device="cpu", generator=generator).to(here.device) for _ in range(2))


def linear(here, index):
    """Made in one thread: all threads share the generator that weights are drawn from."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(here.device)


def replayed(here, net, index, start, replays):
    """Make a step, then that many replays once the others have come as far; return the losses and the weights."""
    optimizer = mgpu_core.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    step = mgpu_core.TrainStep(
        net,
        lambda output, y: (output - y).square().mean(),
        optimizer,
        here.team(1),
        amp_dtype=torch.bfloat16,
        capture=here.is_gpu,
    )
    x, y = rows_of(here, index)
    with here.stream():
        losses = [step(x, y) for _ in range(5)]
        start()
        losses += [step(x, y) for _ in range(replays)]
    here.wait()
    assert not here.is_gpu or step.graphs.replays > replays, step.graphs.reason
    return [torch.stack(losses).cpu(), *(each.detach().cpu() for each in net.parameters())]


def test_replays_at_once_have_the_bits_of_replays_one_after_the_other(here):
    """Gradients of weights are sums over 32,768 rows, which cuBLAS adds up in parts, in the workspace of a stream."""
    replays, both = 200 if here.is_gpu else 3, threading.Barrier(2)
    found: list[list[torch.Tensor]] = [[], []]
    wanted = [replayed(here, linear(here, index), index, lambda: None, replays) for index in range(2)]
    nets = [linear(here, index) for index in range(2)]

    def work(index):
        found[index] = replayed(here, nets[index], index, lambda: both.wait(60), replays)

    in_threads(work, 2)
    for index in range(2):
        assert all(map(torch.equal, found[index], wanted[index])), f"step {index} has other bits"
