"""Graphs that are kept, forgotten, refused or fail to record, on a recorder that has no GPU."""

import warnings
import weakref

import pytest
import torch
from fakes.collector import no_collector
from fakes.graphs import OPTIMIZERS, Replay, give_graphs, pair, recorder_of, same, step_of, without_gpu
from step.nets import Linear, batches
from torch import nn
from torch.optim import RMSprop

from mgpu_core import Replicate, convert_sync_batchnorm
from mgpu_core.devices.graphs import ATTEMPTS, RETRY_AFTER, SEEN
from mgpu_core.optim import SGD
from mgpu_core.step import graph_cache as graphs
from mgpu_core.step.cuda_graphs import CapturedSteps
from mgpu_core.step.graph_cache import WARM_UP


@pytest.fixture(autouse=True)
def the_cpu_has_graphs(monkeypatch):
    give_graphs(monkeypatch, "cpu")


def test_batches_of_too_many_kinds_are_forgotten():
    class Scaled(Linear):
        def forward(self, x, scale):
            return self.last(x * scale)

    net = Scaled()
    step = step_of(net, SGD(net.parameters(), lr=0.001))
    for i in range(SEEN + 10):
        step(torch.ones(4, 3), float(i), torch.ones(4, 2))
    assert len(step.graphs._seen) == SEEN
    for _ in range(WARM_UP + 1):
        step(torch.ones(4, 3), 1.0, torch.ones(4, 2))
    assert step.graphs.replays == 1


@pytest.mark.parametrize(
    ("settings", "call", "reason"),
    [
        ({"error_if_nonfinite": True}, {}, "error_if_nonfinite=True waits"),
        ({"accumulate": 2}, {}, "accumulated over several calls"),
        ({"shares": "auto"}, {}, "takes the time of each rank"),
        ({}, {"return_outputs": True}, "its outputs are returned"),
        ({"make": lambda p: RMSprop(p)}, {}, "its optimizer is none of mgpu_core.optim"),
        ({"net": nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2))}, {}, "ranks meet in synchronised layers"),
    ],
    ids=lambda each: None if isinstance(each, dict) else each,
)
def test_why_not_is_told_once(settings, call, reason):
    settings = dict(settings)
    net = settings.pop("net", None) or Linear()
    net = convert_sync_batchnorm(net)
    make = settings.pop("make", lambda p: SGD(p, lr=0.001))
    step = step_of(net, make(net.parameters()), **settings)
    with warnings.catch_warnings(record=True, action="always") as told:
        for _ in range(6):
            step(torch.ones(4, 3), torch.ones(4, 2), **call)
    texts = [str(each.message) for each in told if "not captured" in str(each.message)]
    assert len(texts) == 1
    assert reason in texts[0]
    assert reason in step.graphs.reason
    assert step.graphs.replays == 0
    assert told[0].filename == __file__


def test_a_device_without_graphs(monkeypatch):
    give_graphs(monkeypatch, "cuda")
    net = Linear()
    step = step_of(net, SGD(net.parameters(), lr=0.001))
    step(torch.ones(4, 3), torch.ones(4, 2))
    with pytest.warns(UserWarning, match="this step is not captured: there are no CUDA graphs on cpu"):
        step(torch.ones(4, 3), torch.ones(4, 2))


def test_parts_of_a_batch_that_no_graph_can_have():
    class Scaled(Linear):
        def forward(self, x, scale):
            return self.last(x * scale)

    net = Scaled()
    step = step_of(net, SGD(net.parameters(), lr=0.001))
    x, y, scale = torch.ones(4, 3), torch.ones(4, 2), Replicate(torch.ones(3))
    step(x, scale, y)
    with pytest.warns(UserWarning, match="neither a plain tensor nor a number") as told:
        step(x, scale, y)
    assert told[0].filename == __file__
    for _ in range(WARM_UP + 2):
        step(x, 2.0, y)
    assert step.graphs.replays == 2


class Waits(Linear):
    """Cannot be recorded: it looks at a number."""

    recording = False

    def forward(self, x):
        if Waits.recording:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return self.last(x)


def test_a_recording_that_fails_leaves_an_ordinary_step(monkeypatch):
    captured, plain = pair(lambda p: SGD(p, lr=0.01, momentum=0.5), net=Waits().double())
    record = recorder_of(captured).record

    def failing(device, work):
        Waits.recording = True
        try:
            return record(device, work)
        finally:
            Waits.recording = False

    monkeypatch.setattr(recorder_of(captured), "record", failing)
    with warnings.catch_warnings(record=True, action="always") as told:
        for x, y in batches(9, 8, columns=3):
            assert torch.equal(captured(x, y), plain(x, y))
    assert same(captured.module, plain.module)
    assert recorder_of(captured).records == 1
    texts = [str(each.message) for each in told if "not captured" in str(each.message)]
    assert len(texts) == 1
    assert "recording it failed (RuntimeError: " in texts[0]
    assert "operation not permitted when stream is capturing" in texts[0]
    assert captured.steps == 9


def test_a_recording_that_fails_behind_its_update_is_tried_so_often_and_no_more(monkeypatch):
    """Its kernels have written nothing, whatever torch has counted."""
    captured, plain = pair(lambda p: SGD(p, lr=0.01, momentum=0.5))

    def failing(_):
        raise RuntimeError("this batch uses other parameters")

    monkeypatch.setattr(CapturedSteps, "check_used", failing)
    with pytest.warns(UserWarning, match=r"recording it failed \(RuntimeError: this batch"):
        losses = [captured(x, 2, y) for x, y in batches(90, 8)]
    assert all(map(torch.equal, losses, [plain(x, 2, y) for x, y in batches(90, 8)]))
    assert same(captured.module, plain.module)
    assert recorder_of(captured).records == ATTEMPTS == 3


def test_a_recording_that_another_thread_has_broken_is_made_later(monkeypatch):
    captured, plain = pair(lambda p: SGD(p, lr=0.01, momentum=0.5))
    record, failures = recorder_of(captured).record, iter([True])

    def disturbed(device, work):
        if next(failures, False):
            raise RuntimeError("operation failed due to a previous error during capture")
        return record(device, work)

    monkeypatch.setattr(recorder_of(captured), "record", disturbed)
    with pytest.warns(UserWarning, match="a loss that is kept with its graph over the same parameters") as told:
        losses = [captured(x, 2, y) for x, y in batches(WARM_UP + 2, 8)]
    assert len(told) == 1
    with warnings.catch_warnings(action="error"):
        losses += [captured(x, 2, y) for x, y in batches(RETRY_AFTER + 5, 8)]
    wanted = [plain(x, 2, y) for count in (WARM_UP + 2, RETRY_AFTER + 5) for x, y in batches(count, 8)]
    assert all(map(torch.equal, losses, wanted))
    assert same(captured.module, plain.module)
    assert captured.graphs.replays == 5
    assert captured.graphs.reason is None


def test_a_replay_that_fails_leaves_the_last_update(monkeypatch):
    captured, plain = pair(OPTIMIZERS["momentum"], net=Linear().double())
    data = list(batches(8, 8, columns=3))
    for x, y in data[:6]:
        captured(x, y)
        plain(x, y)
    assert captured.graphs.replays == 2

    def lost(self):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Replay, "replay", lost)
        with pytest.raises(RuntimeError, match="the device is lost"):
            captured(*data[6])
    assert captured.steps == 6
    assert same(captured.module, plain.module)
    assert torch.equal(captured(*data[7]), plain(*data[7]))


def test_only_so_many_graphs_are_kept():
    """Kinds beyond them go the ordinary way, until one of them is not used any more: nothing is recorded in turns."""
    net = Linear()
    step = step_of(net, SGD(net.parameters(), lr=0.001))

    def train(rows):
        step(torch.ones(rows, 3), torch.ones(rows, 2))

    kinds = range(2, 2 + graphs.KEPT + 2)
    with warnings.catch_warnings(record=True, action="always") as told:
        for _ in range(WARM_UP + 6):
            for rows in kinds:
                train(rows)
    assert [str(each.message).split(" (")[0] for each in told] == [
        f"this step is not captured: {graphs.KEPT} other kinds"
    ]
    assert recorder_of(step).records == len(step.graphs) == graphs.KEPT
    for _ in range(graphs.IDLE + 1):
        train(kinds[1])
    with warnings.catch_warnings(action="error"):
        train(kinds[-1])
    assert step.graphs.reason is None
    assert recorder_of(step).records == graphs.KEPT + 1
    assert len(step.graphs) == graphs.KEPT


def test_a_step_that_is_dropped_takes_its_graphs_along():
    class Graph:
        def replay(self):
            pass

    class Holds:
        """Nothing of the step, as a real recording."""

        def record(self, device, work):
            made.append(Graph())
            return made[-1], [each.clone() for each in work()]

    made = []
    net = Linear()
    step = step_of(net, SGD(net.parameters(), lr=0.001))
    without_gpu(step, Holds())
    for _ in range(WARM_UP + 2):
        step(torch.ones(4, 3), torch.ones(4, 2))
    graph = weakref.ref(made.pop())
    with no_collector():
        del step
        assert graph() is None
