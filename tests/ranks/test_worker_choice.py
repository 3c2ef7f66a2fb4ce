"""Threads or the caller's thread: what is asked for, what `auto` means, and where only threads will do."""

import threading
from typing import ClassVar

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn import functional as F

from mgpu_core import DataParallel, TrainStep, convert_sync_batchnorm, optim
from mgpu_core.ranks.worker_choice import check_workers, workers_for

CPU, OTHERS = torch.device("cpu"), [torch.device("meta", index) for index in range(3)]  # which stand for accelerators


@pytest.mark.parametrize("asked", ["threads", "caller"])
@pytest.mark.parametrize("devices", [[CPU] * 2, OTHERS, OTHERS[:1] * 2])
def test_what_is_asked_for_is_done(asked, devices):
    assert workers_for(asked, devices) == (asked, f'workers="{asked}"')


@pytest.mark.parametrize(
    ("devices", "way", "why"),
    [
        (OTHERS, "threads", "each rank has an accelerator of its own"),
        ([*OTHERS, OTHERS[1]], "caller", "ranks share an accelerator"),
        ([CPU] * 2, "caller", "on the CPU, threads would draw their random numbers in another order each time"),
        ([OTHERS[0], CPU], "caller", "on the CPU, threads would draw their random numbers in another order each time"),
    ],
)
def test_auto_is_threads_where_no_rank_shares_its_accelerator(devices, way, why):
    assert workers_for("auto", devices) == (way, why)


def test_names():
    check_workers("caller")
    with pytest.raises(ValueError, match="workers must be one of threads, caller, auto, not 'processes'"):
        check_workers("processes")


# In a step, and in the drop-in.


def data(rows=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator).double(), torch.arange(rows) % 4


def net_of(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), *more, nn.ReLU(), nn.Linear(6, 4)).double()


class Notes(nn.Linear):
    """Notes the threads that it runs in."""

    seen: ClassVar[list[int]] = []

    def forward(self, x):
        self.seen.append(threading.get_ident())
        return super().forward(x)


@pytest.mark.parametrize(
    ("options", "way", "why"),
    [
        ({}, "caller", "on the CPU, threads would draw their random numbers in another order each time"),
        ({"workers": "threads"}, "threads", 'workers="threads"'),
        ({"workers": "caller"}, "caller", 'workers="caller"'),
    ],
)
@pytest.mark.several_ranks
def test_a_step_says_how_its_ranks_run_and_why(ranks, options, way, why):
    net, seen = Notes(8, 4).double(), Notes.seen
    step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), ["cpu"] * ranks, **options)
    assert [(each.workers, each.why) for each in step.plan()] == [(way, why)] * ranks
    assert why in str(step.plan())
    seen.clear()
    step(*data())
    assert set(seen) == {threading.get_ident()} if way == "caller" else len(set(seen)) == ranks
    assert "workers" not in step.state_dict()


NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.3), nn.Linear(64, 4)),
    "wide": lambda: nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 4)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 8, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(120, 4),
    ),
    "encoder": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 64, 0.1, batch_first=True), nn.Flatten(),
        nn.Linear(8, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("net", NETS)
def test_twenty_runs_with_the_defaults_have_the_same_bits(net, threads):
    before, results = torch.get_num_threads(), set()
    x, y = torch.randn(512, 8, generator=torch.Generator().manual_seed(1)), torch.arange(512) % 4
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            torch.manual_seed(0)
            module = NETS[net]()
            step = TrainStep(module, F.cross_entropy, optim.AdamW(module.parameters(), lr=0.01), ["cpu"] * 2)
            losses = [float(step(x, y)) for _ in range(9)]
            results.add((*losses, *(float(each.double().sum()) for each in module.parameters())))
            step.close()
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


@pytest.mark.parametrize("dropout", [(), (nn.Dropout(0.5),)])
@pytest.mark.several_ranks
def test_both_ways_give_the_same_bits_with_one_intra_op_thread(ranks, dropout):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = []
        for workers in ("threads", "caller"):
            net = net_of(*dropout)
            step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(ranks), workers=workers)
            torch.manual_seed(3)
            results.append([*[step(*data()) for _ in range(4)], *net.parameters()])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


class Checkpointed(nn.Module):
    """Recomputes its inside in the backward, with dropout."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 4)).double()
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.inner(x)
        return torch.utils.checkpoint.checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.several_ranks
def test_a_checkpoint_draws_the_numbers_of_its_own_rank_again(ranks, workers, reentrant):
    gradients = []
    for way in (None, reentrant):
        torch.manual_seed(0)
        net = Checkpointed(way)
        step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(ranks), workers=workers)
        torch.manual_seed(3)
        step(*data())
        gradients.append([each.grad for each in net.parameters()])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*gradients, strict=True))


def test_the_caller_is_refused_where_ranks_meet():
    net = convert_sync_batchnorm(net_of(nn.BatchNorm1d(6)))
    with pytest.raises(ValueError, match=r'workers="caller" .* meet in synchronised layers'):
        TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(2), workers="caller")
    step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(2))
    step(*data())
    assert step.plan()[0][-2:] == ("threads", "ranks wait for each other in synchronised layers")


@pytest.mark.parametrize("workers", ["threads", "caller", "auto"])
def test_the_drop_in_computes_the_same_in_every_way(ranks, workers):
    net = net_of()
    x, y = data()
    F.cross_entropy(net(x), y).backward()
    wanted = [each.grad.clone() for each in net.parameters()]
    wrapped = DataParallel(net, cpu(ranks), workers=workers)
    for _ in range(3):
        net.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        assert all(torch.allclose(a.grad, b, rtol=0, atol=1e-12) for a, b in zip(net.parameters(), wanted, strict=True))


def test_a_failure_in_the_callers_thread_names_its_rank():
    class Fails(nn.Linear):
        def forward(self, x):
            if x[0, 0] > 7:
                raise KeyError("as asked")
            return super().forward(x)

    net = Fails(8, 4).double()
    x = torch.arange(16.0).double()[:, None].expand(16, 8).contiguous()
    with pytest.raises(KeyError, match="Caught KeyError in replica 1 on device cpu"):
        DataParallel(net, cpu(2), workers="caller")(x)
    step = TrainStep(net, F.mse_loss, optim.SGD(net.parameters(), lr=0.1), cpu(2), workers="caller")
    with pytest.raises(KeyError, match="Caught KeyError in replica 1 on device cpu"):
        step(x, torch.zeros(16, 4).double())
    step(x[:8] * 0, torch.zeros(8, 4).double())
    assert step.steps == 1
