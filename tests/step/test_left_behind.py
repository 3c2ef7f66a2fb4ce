"""Nothing keeps a dropped or closed step alive, and it leaves nothing in nets, optimizers and threads."""

import gc
import time
import warnings
import weakref
from functools import partial

import pytest
import torch
from fakes.collector import no_collector, wake_workers
from fakes.nets import cpu
from step.nets import Linear, mse
from torch import nn
from torch.optim import SGD, Adam

from mgpu_core import DataParallel, SyncBatchNorm, TrainStep, convert_sync_batchnorm, optim
from mgpu_core.ranks.team import Team


def test_nothing_keeps_a_step_alive():
    net = Linear()
    step = TrainStep(net, mse, Adam(net.parameters()), cpu(2))
    optimizer = step.optimizer
    step(torch.ones(4, 3), torch.zeros(4, 2))
    net.trainer = step
    step.register_comm_hook(lambda bucket, of=step: None)
    gone = weakref.ref(step)
    del net, step
    gc.collect()
    assert gone() is None
    assert not optimizer._optimizer_load_state_dict_post_hooks


@pytest.mark.parametrize("make", [SGD, optim.SGD])
def test_a_closed_step_leaves_the_optimizer_alone(make):
    net = Linear()
    optimizer = make(net.parameters(), lr=1.0)
    step = TrainStep(net, mse, optimizer, cpu(2))
    step(torch.ones(4, 3), torch.zeros(4, 2))
    step.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in net.parameters())
    with warnings.catch_warnings(action="error"):
        optimizer.step()


@pytest.mark.parametrize("wrap", ["step", "drop-in"])
def test_synchronised_layers_leave_nothing(wrap):
    net = nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4), nn.Linear(4, 2))
    outputs = []
    net[1].register_forward_hook(lambda module, args, out: outputs.append(weakref.ref(out)))
    x, y = torch.randn(8, 4), torch.zeros(8, 2)
    if wrap == "step":
        step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
        run = lambda: step(x, y)  # noqa: E731
    else:
        model = DataParallel(net, cpu(2))
        run = lambda: mse(model(x), y).backward()  # noqa: E731
    for _ in range(3):
        run()
    wake_workers()
    gc.collect()
    assert len(outputs) >= 3
    assert all(each() is None for each in outputs)


def test_a_layer_with_two_names_is_converted_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.BatchNorm1d(2)
            self.b, self.inner = self.a, nn.Sequential(self.a)

    net = Twice()
    calls = []
    net.a.register_forward_hook(lambda *_: calls.append(1))
    convert_sync_batchnorm(net)
    assert isinstance(net.a, SyncBatchNorm)
    assert net.a is net.b is net.inner[0]
    net.a(torch.randn(3, 2))
    assert calls == [1]


def test_close_ends_the_threads_of_smaller_batches_too():
    teams = [Team.of(cpu(count)) for count in (5, 3, 2)]

    def threads():
        return {thread for team in teams for thread in team.workers.threads()}

    for team in teams:  # other tests have had them, too; of those a thread may still be at work
        team.close()
    before = threads()
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(5), workers="threads")
    for count in (5, 3, 2):
        step(torch.ones(count, 3), torch.zeros(count, 2))
    mine = threads() - before
    assert len(mine) == 10
    step.close()
    until = time.monotonic() + 10
    while threads() & mine and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads() & mine


@pytest.mark.parametrize("make", [partial(optim.SGD, momentum=1.0), optim.Adam, optim.Lion])
def test_an_optimizer_that_loads_an_empty_state_starts_anew(make):
    net = Linear()
    optimizer = make(net.parameters(), lr=1.0)
    fresh, first = optimizer.state_dict(), [each.detach().clone() for each in net.parameters()]
    step = TrainStep(net, mse, optimizer, cpu(2))
    found = []
    for _ in range(2):
        with torch.no_grad():
            list(map(torch.Tensor.copy_, net.parameters(), first))
        optimizer.load_state_dict(fresh)
        step(torch.ones(4, 3), torch.zeros(4, 2))
        found.append(net.last.weight.detach().clone())
    assert torch.equal(*found)


class HooksItself(Linear):
    """Its hook is a method of its own: a replica's holds the replica."""

    def __init__(self):
        super().__init__()
        self.last.register_forward_hook(self.note)

    def note(self, *_):
        pass


def test_a_replica_with_a_hook_of_its_own_ends_with_its_call():
    net = HooksItself()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(3))
    with no_collector():
        for _ in range(4):
            step(torch.ones(6, 3), torch.ones(6, 2))
        wake_workers()
        assert sum(type(each) is HooksItself for each in gc.get_objects()) == 1


class Keeps(nn.Module):
    """Keeps a method of its own, as a patched forward does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.run = self.inner.forward

    def forward(self, x):
        replicas.append(weakref.ref(self))
        if x.isnan().any():
            raise ValueError("a bad batch")
        return self.run(x)


replicas = []


@pytest.mark.several_ranks
def test_a_call_that_fails_frees_its_replicas():
    net = Keeps()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), workers="threads")
    step(torch.ones(4, 4), torch.zeros(4, 2))
    replicas.clear()
    with no_collector():
        with pytest.raises(ValueError, match="a bad batch"):
            step(torch.full((4, 4), torch.nan), torch.zeros(4, 2))
        wake_workers()
        assert len(replicas) == 2
        assert [each() for each in replicas if each() is not net] == [None]
