"""Compiled modules: every replica runs its own weights, compiled once per rank."""

import copy
import gc
import sys
import threading
import weakref
from types import ModuleType

import pytest
import torch
from fakes.collector import no_collector
from fakes.nets import cpu, whole
from torch import nn

import mgpu_core
from mgpu_core import DataParallel, replicate
from mgpu_core.ranks.compiled import _Compiler

pytestmark = pytest.mark.several_ranks


class Backend:
    """Counts what torch compiles, and runs it as it is."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, _example):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def small():
    return whole(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))


def wrapped(net, backend):
    return torch.compile(net, backend=backend)


def in_place(net, backend):
    net.compile(backend=backend)
    return net


def wrapped_child(net, backend):
    net[0] = torch.compile(net[0], backend=backend)
    return net


def in_place_child(net, backend):
    net[2].compile(backend=backend)
    return net


WAYS = [wrapped, in_place, wrapped_child, in_place_child]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_training_equals_the_plain_module_and_compiles_once_per_rank(ranks, way):
    plain, backend = small(), Backend()
    net = copy.deepcopy(plain)
    model = DataParallel(way(net, backend), cpu(ranks))
    x = torch.arange(ranks * 6.0).view(ranks * 2, 3) % 5
    for step in range(4):
        for module in (model, plain):
            module.zero_grad()
            module(x).sum().backward()
        grads = [p.grad for p in model.parameters()]
        assert all(torch.equal(one, p.grad) for one, p in zip(grads, plain.parameters(), strict=True)), step
        with torch.no_grad():  # small whole numbers stay exact; the next forward must see them
            for p in (*model.parameters(), *plain.parameters()):
                p.data.copy_((p + step) % 3)
        assert backend.graphs == ranks, "compiled once per rank, in the first forward"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_replicas_run_their_own_weights(way):
    net = way(small(), Backend())
    twins = replicate(net, cpu(3))
    with torch.no_grad():
        for parameter in twins[2].modules():
            for tensor in getattr(parameter, "_former_parameters", {}).values():
                tensor.zero_()
    x = torch.ones(2, 3)
    assert torch.equal(twins[2](x), torch.zeros(2, 2))
    assert torch.equal(twins[1](x), net(x))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_modes_and_shapes_compile_anew_and_results_stay_right(way):
    plain, backend = small(), Backend()
    net = copy.deepcopy(plain)
    model = DataParallel(way(net, backend), cpu(2))
    for rows in (2, 8, 5, 3):
        for train in (True, False):
            x = torch.ones(rows, 3)
            assert torch.equal(model.train(train)(x), plain(x))
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))


def test_compiled_by_aot_autograd_and_trained():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    net = copy.deepcopy(plain)
    model = DataParallel(torch.compile(net, backend="aot_eager"), cpu(3))
    for module in (model, plain):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for step in range(5):
            optimizer.zero_grad()
            module(torch.linspace(0, 1 + step, 28, dtype=torch.float64).view(7, 4)).square().sum().backward()
            optimizer.step()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_buffers_of_rank_0_are_the_compiled_modules_own():
    net = nn.BatchNorm1d(3)
    model = DataParallel(torch.compile(net, backend=Backend()), cpu(2))
    model(torch.arange(12.0).view(4, 3))
    assert net.num_batches_tracked.item() == 1
    wanted = nn.BatchNorm1d(3)
    wanted(torch.arange(6.0).view(2, 3))
    assert torch.equal(net.running_mean, wanted.running_mean)


def test_compiling_again_with_other_settings_is_seen():
    net, first, second = small(), Backend(), Backend()
    model, x = DataParallel(net, cpu(2)), torch.ones(4, 3)
    net.compile(backend=first)
    model(x)
    net.compile(backend=second)
    model(x)
    assert (first.graphs, second.graphs) == (2, 2)


def test_a_forward_that_is_compiled_inside(ranks):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = small()

        @torch.compile(backend="eager")
        def forward(self, x):
            return self.body(x)

    net = Inside()
    x = torch.arange(ranks * 3.0).view(ranks, 3)
    assert torch.equal(DataParallel(net, cpu(ranks))(x), net(x))


def test_a_compiled_caller_runs_the_wrapper_as_it_is(ranks):
    backend = Backend()
    net = small()
    model, x = DataParallel(net, cpu(ranks)), torch.ones(ranks, 3)
    step = torch.compile(lambda x: model(x * 2) + 1, backend=backend)
    assert torch.equal(step(x), net(x * 2) + 1)
    assert backend.graphs == 2, "what stands before the wrapper, and what stands behind it"
    assert torch.equal(torch.compile(model, backend=backend)(x), net(x))


def test_eight_user_threads_compile_one_wrapper():
    backend, net = Backend(), small()
    model, x = DataParallel(torch.compile(net, backend=backend), cpu(3)), torch.ones(6, 3)
    wanted, found, errors = net(x), [], []

    def work():
        try:
            found.append(model(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(found) == 8
    assert all(torch.equal(out, wanted) for out in found)


def hooked(net):
    net = torch.compile(net, backend="eager")
    net.register_forward_hook(lambda *_: None)
    return net


def own_call(net):
    net._compiled_call_impl = lambda *args: net._call_impl(*args)
    return net


@pytest.mark.parametrize("way", [hooked, own_call])
def test_what_cannot_be_repeated_is_refused_with_advice(way):
    with pytest.raises(TypeError, match="Compile inside instead"):
        DataParallel(way(small()), cpu(2))(torch.ones(4, 3))


def test_nothing_is_kept_of_a_module_that_is_gone():
    net = small()
    net.compile(backend=Backend())
    model = DataParallel(net, cpu(2))
    model(torch.ones(4, 3)).sum().backward()
    gone = weakref.ref(net)
    del net, model
    torch.compiler.reset()
    gc.collect()
    assert gone() is None


def test_replicas_of_compiled_modules_leave_no_cycles():
    net = torch.compile(small(), backend=Backend())
    model, x = DataParallel(net, cpu(3)), torch.ones(6, 3)
    model(x).sum().backward()
    with no_collector():
        live = sum(isinstance(each, nn.Linear) for each in gc.get_objects())
        for _ in range(3):
            model(x).sum().backward()
        assert sum(isinstance(each, nn.Linear) for each in gc.get_objects()) == live


def test_a_compiler_that_does_not_come_back_in_time(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.2")
    compiler, taken, done = _Compiler(), threading.Event(), threading.Event()

    def takes():
        with compiler.used(alone=True):
            taken.set()
            done.wait(10)

    def lends():
        with compiler.used(alone=True), compiler.exclusive.lent():
            other.start()
            assert taken.wait(10)

    other = threading.Thread(target=takes)
    with pytest.raises(mgpu_core.Error, match="busy in another rank"):
        lends()
    with pytest.raises(mgpu_core.Error, match="busy in another rank"), compiler.used(alone=False):
        pass  # the other has it for itself still
    done.set()
    other.join()
    with compiler.used(alone=True):
        pass


def test_a_forward_while_another_thread_loads_the_compiler(monkeypatch):
    """Its module is there already, and has nothing in it yet."""
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", ModuleType("torch._dynamo.eval_frame"))

    class New(nn.Linear):
        pass

    assert DataParallel(New(2, 3), ["cpu"] * 2)(torch.ones(4, 2)).shape == (4, 3)
