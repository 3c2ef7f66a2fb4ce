"""What a call costs in Python: calls as cProfile counts them, and the files between the public call and the core."""

import cProfile
import gc
import pstats
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import torch
from fakes.collector import FREES_LATE
from torch.nn.functional import cross_entropy

import mgpu_core
from mgpu_core.comm import dispatch
from mgpu_core.kernels import flat_optimizers
from mgpu_core.tools.mnist.model import SimpleNet

PACKAGE = Path(mgpu_core.__file__).parent
LIMITS = tomllib.loads((Path(__file__).parent / "size.toml").read_text())
COUNTS_ONE_THREAD = pytest.mark.skipif(
    FREES_LATE, reason="cProfile counts all threads, of which idle workers wake on a free-threaded build"
)

X, Y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))


def calls_of(step):
    """Python and builtin calls of a step, after some that plan."""
    for _ in range(5):
        step()
    gc.collect()  # what other tests have left calls functions when it goes
    profile = cProfile.Profile()
    profile.runcall(step)
    return pstats.Stats(profile).total_calls


@COUNTS_ONE_THREAD
def test_a_forward_loss_and_backward_make_few_calls():
    model = mgpu_core.DataParallel(SimpleNet(), ["cpu"] * 4)
    assert calls_of(lambda: cross_entropy(model(X), Y).backward()) <= 615


@COUNTS_ONE_THREAD
@pytest.mark.parametrize(
    ("optimizer", "ranks", "most"),
    [
        (mgpu_core.optim.SGD, 1, 135),
        (mgpu_core.optim.SGD, 2, 255),
        (torch.optim.SGD, 1, 240),
        (torch.optim.SGD, 2, 360),
    ],
)
def test_a_step_makes_few_calls(optimizer, ranks, most):
    net = SimpleNet()
    optimizer = optimizer(net.parameters(), lr=0.01, momentum=0.9)
    step = mgpu_core.TrainStep(net, cross_entropy, optimizer, ["cpu"] * ranks, workers="caller")
    assert calls_of(lambda: step(X, Y)) <= most


def route_of(work):
    """Return how often a call goes from one file of the package to another and back, and which files it sees."""
    for _ in range(5):
        work()
    files, stack, changes = set(), [None], 0

    def see(frame, event, _):
        nonlocal changes
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        if event == "call":
            files.add(str(path.relative_to(PACKAGE)))
            changes += stack[-1] != path
            stack.append(path)
        elif len(stack) > 1:
            stack.pop()
            changes += stack[-1] not in (None, path)

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return changes, files


def test_a_forward_loss_and_backward_stay_in_few_files():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model = mgpu_core.DataParallel(net, ["cpu"] * 2, workers="caller")
    x, y = torch.randn(8, 8), torch.randint(3, (8,))
    changes, files = route_of(lambda: cross_entropy(model(x), y).backward())
    assert changes <= 110
    assert len(files) <= 23, sorted(files)
    assert not files & {"trace/tracer.py", "comm/traffic_trace.py", "comm/trace_hooks.py"}, "nothing is recorded"


@pytest.mark.parametrize(("ranks", "most", "most_files"), [(1, 75, 22), (2, 120, 30)])
def test_a_step_stays_in_few_files(ranks, most, most_files):
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = mgpu_core.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    step = mgpu_core.TrainStep(net, cross_entropy, optimizer, ["cpu"] * ranks, workers="caller")
    x, y = torch.randn(8, 8), torch.randint(3, (8,))
    changes, files = route_of(lambda: step(x, y))
    assert changes <= most
    assert len(files) <= most_files, sorted(files)
    assert not files & {"trace/tracer.py", "comm/traffic_trace.py", "comm/trace_hooks.py"}, "nothing is recorded"


class Route:
    """Counts the calls of functions of the package from another file of it, in all threads that have run a layer."""

    def __init__(self):
        self.calls, self._is_on, self._own = 0, False, threading.local()

    def see(self, frame, event, _):
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(f"{PACKAGE}/"):
            return
        stack = self._own.__dict__.setdefault("stack", [])
        if event == "call":
            self.calls += self._is_on and stack[-1:] != [path]
            stack.append(path)
        elif stack:
            stack.pop()

    def net(self):
        """Return a net whose middle layer lets its thread be seen."""

        class Seen(torch.nn.Module):
            def forward(_, x):  # noqa: N805
                if sys.getprofile() != self.see:
                    sys.setprofile(self.see)
                return x.relu()

        return torch.nn.Sequential(torch.nn.Linear(8, 8), Seen(), torch.nn.Linear(8, 3))

    def calls_of(self, work):
        for _ in range(5):
            work()
        sys.setprofile(self.see)
        self._is_on = True
        try:
            work()
        finally:
            self._is_on = False
            sys.setprofile(None)
        return self.calls


def copies(net, x, _):
    model = mgpu_core.DataParallel(net, ["cpu"] * 2, workers="caller")
    return lambda: model(x)


def trained(net, x, y):
    optimizer = mgpu_core.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    step = mgpu_core.TrainStep(net, cross_entropy, optimizer, ["cpu"] * 2, workers="caller")
    return lambda: step(x, y)


def staged(net, x, _):
    model = mgpu_core.Pipeline(net, ["cpu"] * 2, split_points=["2"], chunks=2)
    return lambda: model(x)


def cut(net, x, _):
    model = mgpu_core.TensorParallel(net, ["cpu"] * 2, {"0": "column", "2": "row"})
    return lambda: model(x)


def asked(net, x, _):
    predict = mgpu_core.Predictor(net, ["cpu"])
    return lambda: predict(x)


WAYS = {"DataParallel": copies, "TrainStep": trained, "Pipeline": staged, "TensorParallel": cut, "Predictor": asked}


@pytest.mark.parametrize("name", WAYS)
def test_calls_into_another_file_only_fall(name):
    route = Route()
    work = WAYS[name](route.net(), torch.randn(8, 8), torch.randint(3, (8,)))
    assert route.calls_of(work) <= LIMITS[f"calls of {name}"]["most"]


def files_on_the_stack():
    """Of the package, those that are on the way to the caller; without what keeps the compiler away."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        found.append(Path(frame.f_code.co_filename))
        frame = frame.f_back
    return {str(each.relative_to(PACKAGE)) for each in found if each.is_relative_to(PACKAGE)} - {"ranks/compiled.py"}


def test_an_update_reaches_the_core_in_four_files(monkeypatch, ranks):
    files, kernel = [], flat_optimizers._KERNELS["sgd"]

    def core(*arguments):
        files.append(files_on_the_stack())
        kernel.core(*arguments)

    monkeypatch.setitem(flat_optimizers._KERNELS, "sgd", kernel._replace(core=core))
    net = torch.nn.Linear(2, 1)
    optimizer = mgpu_core.optim.SGD(net.parameters(), lr=0.1)
    mgpu_core.TrainStep(net, cross_entropy, optimizer, ["cpu"] * ranks)(torch.ones(4, 2), torch.ones(4, 1))
    assert files == [{"kernels/flat_optimizers.py", "optim/optimizer.py", "step/update.py", "step/train_step.py"}]


def test_scatter_reaches_the_core_in_four_files(monkeypatch):
    files = []

    class Core:
        def __getattr__(self, name):
            return getattr(mgpu_core._core, name)

        def scatter(self, *arguments):
            files.append(files_on_the_stack())
            mgpu_core._core.scatter(*arguments)

    monkeypatch.setattr(dispatch, "_core", Core())
    mgpu_core.DataParallel(torch.nn.Linear(2, 1), ["cpu"] * 2)(torch.ones(4, 2))
    assert files == [{"comm/dispatch.py", "comm/autograd.py", "parallel/scatter_inputs/cut.py", "data_parallel.py"}]
