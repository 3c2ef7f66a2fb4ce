"""Several threads of the caller's at once, as docs/thread_safety.md promises, with and without the GIL."""

import copy
import gc
import inspect
import os
import subprocess
import sys
import sysconfig
import threading

import pytest
import torch
from fakes.nets import Polynomial, cpu, whole
from fakes.tensors import numbers
from fakes.threads import at_once
from torch import nn

import mgpu_core
from mgpu_core import DataParallel, Predictor, SyncBatchNorm, TrainStep, _core
from mgpu_core.comm import all_reduce
from mgpu_core.trees import replica_hooks

ROUNDS = [3, pytest.param(200, marks=pytest.mark.soak)]
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
DRAWS_ARE_SAFE = pytest.mark.skipif(
    torch.__version__ < "2.13" and not HAS_GIL, reason="torch before 2.13 has a race in PyHandleCache.h"
)


@pytest.fixture(autouse=True)
def few_objects():
    """Let collections look at the objects of the test alone: a process with many libraries has a million others."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.skipif(not FREE_THREADED, reason="the build has no other mode than with the GIL")
def test_the_import_leaves_the_gil_off():
    program = (
        "import sys, mgpu_core\n"
        "for name in mgpu_core.__all__: getattr(mgpu_core, name)\n"
        "print('mgpu_core._core' in sys.modules, sys._is_gil_enabled())\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    ran = subprocess.run([sys.executable, "-P", "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.split()) == (0, ["True", "False"]), ran.stderr


def dot(output, target):
    return (output * target).sum()


def of_one_device(net, x):
    """Return the output and the gradients that one device has for the sum of the outputs."""
    alone = copy.deepcopy(net)
    output = alone(x)
    output.sum().backward()
    return output.detach(), [each.grad for each in alone.parameters()]


def equal(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def trains(wrapper, x):
    """Return a function that trains a copy of the wrapper's module by a wrapper of its own, and compares."""
    wanted = of_one_device(wrapper.module, x)[1]

    def work():
        own = DataParallel(copy.deepcopy(wrapper.module), wrapper.device_ids)
        own(x).sum().backward()
        assert equal([each.grad for each in own.module.parameters()], wanted)

    return work


class Fails(nn.Module):
    def forward(self, x):
        raise KeyError("as asked")


def fails():
    with pytest.raises(KeyError, match="Caught KeyError in replica 0 on device cpu"):
        DataParallel(Fails(), cpu(2))(torch.ones(4, 1))


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("other", [None, fails, gc.collect])
def test_threads_share_a_wrapper(other, rounds):
    wrapper, x = DataParallel(Polynomial(), cpu(3)), numbers(12, 3)
    wanted = of_one_device(wrapper.module, x)[0]

    def infers():
        with torch.no_grad():
            assert torch.equal(wrapper(x), wanted)

    others = [wrapper.close, trains(wrapper, x)] if other is None else [other]
    at_once(infers, infers, infers, *others, rounds=rounds)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_threads_add_up_gradients_of_a_shared_wrapper(rounds):
    """Each forward has a graph of its own; autograd adds to ``grad`` as on one device: under a lock of the caller's."""
    wrapper, x = DataParallel(Polynomial(), cpu(2)), numbers(8, 3)
    wanted = of_one_device(wrapper.module, x)[1]
    lock = threading.Lock()

    def works():
        output = wrapper(x)
        with lock:
            output.sum().backward()

    at_once(works, works, works, rounds=rounds)
    assert equal([each.grad for each in wrapper.module.parameters()], [3 * rounds * each for each in wanted])


@pytest.mark.parametrize("rounds", ROUNDS)
def test_threads_make_steps_of_their_own(rounds):
    x, y = numbers(8, 3), numbers(8, 2)

    def works():
        net, alone = whole(nn.Linear(3, 2)), whole(nn.Linear(3, 2))
        plain, own = (torch.optim.SGD(each.parameters(), lr=1.0, momentum=1.0) for each in (alone, net))
        step = TrainStep(net, dot, own, cpu(2), reduction="sum", workers="threads")
        for _ in range(4):
            loss = dot(alone(x), y)
            plain.zero_grad()
            loss.backward()
            plain.step()
            assert torch.equal(step(x, y), loss.detach())
        assert equal(net.parameters(), alone.parameters())

    at_once(works, works, works, rounds=rounds)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_step_has_one_caller_at_a_time(rounds):
    """A call is refused or done as a whole: the parameter counts those that were done."""
    net = whole(nn.Linear(1, 1, bias=False))
    before = net.weight.item()
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    step = TrainStep(net, dot, sgd, cpu(2), reduction="sum", workers="threads")
    done = []

    def works():
        done.append(is_done(lambda: step(torch.ones(2, 1), torch.ones(2, 1)), "this step is already running"))

    at_once(works, works, works, rounds=rounds)
    assert len(done) == 3 * rounds
    assert step.steps == sum(done) >= 1
    assert net.weight.item() == before - 2 * sum(done)


def is_done(work, refusal):
    """Return whether a work went through, or was refused in these words."""
    try:
        work()
    except RuntimeError as error:
        if refusal not in str(error):
            raise
        return False
    return True


def test_a_second_caller_of_a_step_is_refused():
    """The first one is held in its forward until the second one has been refused."""
    inside, refused = threading.Event(), threading.Event()

    class Waits(nn.Linear):
        def forward(self, x):
            inside.set()
            assert refused.wait(20)
            return super().forward(x)

    net = Waits(1, 1)
    step = TrainStep(net, dot, torch.optim.SGD(net.parameters(), lr=1.0), cpu(2), reduction="sum")

    def second():
        assert inside.wait(20)
        try:
            with pytest.raises(RuntimeError, match="this step is already running: one call at a time"):
                step(torch.ones(2, 1), torch.ones(2, 1))
        finally:
            refused.set()

    at_once(lambda: step(torch.ones(2, 1), torch.ones(2, 1)), second)
    assert step.steps == 1


@pytest.mark.parametrize("rounds", ROUNDS)
def test_threads_with_synchronised_layers(rounds):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x = numbers(9, 3).double()

    def works():
        net = mgpu_core.convert_sync_batchnorm(copy.deepcopy(plain))
        alone = copy.deepcopy(plain)
        wrapper = DataParallel(net, cpu(3))
        for _ in range(2):
            assert torch.allclose(wrapper(x), alone(x), rtol=0, atol=1e-10)
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(net.buffers(), alone.buffers(), strict=True))

    at_once(works, works, works, rounds=rounds)


@DRAWS_ARE_SAFE
@pytest.mark.parametrize("rounds", ROUNDS)
def test_threads_that_draw(rounds):
    wrapper, x = DataParallel(nn.Dropout(0.5), cpu(3)), torch.ones(12, 50)

    def works():
        drawn = wrapper(x)
        assert set(drawn.unique().tolist()) == {0, 2}
        assert len(drawn.unique(dim=0)) == 12  # neither ranks nor threads share a generator

    at_once(works, works, works, rounds=rounds)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_one_recording_at_a_time(rounds):
    wrapper, x = DataParallel(Polynomial(), cpu(2)), numbers(8, 3)
    made, done = [], []

    def recorded():
        with mgpu_core.explain() as trace:
            wrapper(x)
        made.append(trace)

    def records():
        done.append(is_done(recorded, "a recording is already on"))

    at_once(records, records, lambda: wrapper(x), rounds=rounds)
    assert len(done) == 2 * rounds
    assert len(made) == sum(done) >= 1
    assert all(any("forward" in trace.table(each.number) for each in trace.steps) for trace in made)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_collectives_of_several_threads(rounds):
    before = counted()

    def works():
        parts = [numbers(1000) + rank for rank in range(3)]
        all_reduce(parts)
        assert all(torch.equal(each, 3 * numbers(1000) + 3) for each in parts)

    at_once(works, works, works, rounds=rounds)
    assert counted() - before == 3 * 3 * rounds  # of each rank in each call of each thread


def counted():
    return sum(calls for (operation, *_), (calls, _) in _core.counters().items() if operation == "all_reduce")


@pytest.mark.parametrize("rounds", ROUNDS)
def test_threads_share_a_predictor(rounds):
    net = Polynomial()
    inputs = [numbers(rows, 3) for rows in (1, 2, 5)]
    wanted = [net(x).detach() for x in inputs]
    with Predictor(net, cpu(2), max_batch=4, max_wait_ms=0.5) as predict:

        def asks():
            for x, output in zip(inputs, wanted, strict=True):
                assert torch.equal(predict(x), output)

        def looks():
            assert "rank" in str(predict.stats())
            predict.refresh()

        at_once(asks, asks, asks, looks, rounds=rounds)
        assert sum(each.rows for each in predict.stats()) == 3 * rounds * (1 + 2 + 5)


def test_statistics_are_read_while_they_grow():
    """A worker appends while another thread prints."""
    stats = mgpu_core.inference.stats.DeviceStats("cpu")
    table = mgpu_core.inference.stats.Stats([stats])

    stop = threading.Event()

    def grows():
        try:
            for _ in range(100_000):
                stats.queue_seconds.append(1.0)
        finally:
            stop.set()

    def looks():
        while not stop.is_set():
            assert "cpu" in str(table)

    at_once(grows, looks, looks)
    assert len(stats.queue_seconds) == stats.queue_seconds.maxlen


def test_layers_made_in_several_threads_are_told_apart():
    made = []
    at_once(*[lambda: made.extend([SyncBatchNorm(1).number for _ in range(300)])] * 3)
    assert len(set(made)) == 900


def test_no_thread_finds_half_of_the_hook_methods_wrapped(monkeypatch):
    """A second first forward comes while the first one wraps torch's methods: at its end all of them are wrapped."""
    for name in replica_hooks._METHODS:
        monkeypatch.setattr(nn.Module, name, inspect.unwrap(getattr(nn.Module, name)))
    wrap, seen = replica_hooks._wrapped, []

    def wrapped(method):
        if not seen and hasattr(nn.Module.register_forward_hook, "mgpu_core_wraps"):
            seen.append(None)
            replica_hooks.keep_hooks_apart()
            seen[:] = [hasattr(getattr(nn.Module, name), "mgpu_core_wraps") for name in replica_hooks._METHODS]
        return wrap(method)

    monkeypatch.setattr(replica_hooks, "_wrapped", wrapped)
    replica_hooks.keep_hooks_apart()
    assert seen == [True] * len(replica_hooks._METHODS)
