"""A trace on a real GPU: times by events, on the host's axis, without a wait inside the step."""

import json

import pytest
import torch

import mgpu_core
from mgpu_core.trace.events import Collective


def busy(rounds):
    a = torch.linspace(0, 1, 1 << 20, device="cuda:0").view(1024, 1024)  # nothing is drawn: ranks would take turns
    for _ in range(rounds):
        a = a @ a
        a = a / a.norm()
    return a


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_forward_is_as_long_as_the_gpu_works(ranks):
    class Busy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) + busy(50)[0, 0] * 0

    model = mgpu_core.DataParallel(Busy().cuda(), [0] * ranks)
    x = torch.randn(8, 4, device="cuda:0")
    model(x).sum().backward()
    with mgpu_core.explain() as trace:
        model(x).sum().backward()
    step = trace.step()
    forwards = [span for span in step.spans if span.step == "forward"]
    assert [span.device for span in forwards] == ["cuda:0"] * ranks
    for span in forwards:
        assert span.begin_ns < span.end_ns
        assert span.end_ns - span.begin_ns > span.host_end_ns - span.host_begin_ns  # launched long before it was done
    last = max(span.end_ns for span in forwards)
    assert step.begin_ns <= min(span.begin_ns for span in forwards) < last <= step.end_ns
    assert all(set(call.times) <= {"cuda:0"} for call in step.collectives)


@pytest.mark.parametrize("algorithm", ["direct", "ring", "naive"])
def test_hops_and_streams(algorithm):
    tensors = [torch.ones(1 << 20, device="cuda:0") for _ in range(3)]
    with mgpu_core.explain() as trace:
        mgpu_core.comm.all_reduce(tensors, algorithm=algorithm, merge_shared_devices=False)
    (call,) = trace.step().collectives
    assert isinstance(call, Collective)
    assert call.route == algorithm
    assert all(hop.stream.startswith("cuda:0 stream") for hop in call.hops)
    begin, end = call.times["cuda:0"]
    assert end > begin


@pytest.mark.parametrize("capture", [False, True])
def test_a_training_step(capture, tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).cuda()
    optimizer = mgpu_core.optim.SGD(net.parameters(), 0.1)
    step = mgpu_core.TrainStep(net, torch.nn.functional.cross_entropy, optimizer, [0, 0], capture=capture)
    x, y = torch.randn(32, 64, device="cuda:0"), torch.randint(0, 10, (32,), device="cuda:0")
    with mgpu_core.explain() as trace:  # graphs are recorded and replayed inside
        for _ in range(12):
            step(x, y)
    step.close()
    assert [each.name for each in trace.steps] == ["train_step"] * 12
    first = trace.steps[2]
    assert sorted(span.rank for span in first.spans if span.step == "backward") == [0, 1]
    trace.save_html(tmp_path / "page.html")
    trace.save_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_profiler_sees_the_ranks_and_their_kernels():
    model = mgpu_core.DataParallel(torch.nn.Linear(64, 64).cuda(), [0, 0])
    x = torch.randn(8, 64, device="cuda:0")
    model(x)
    with mgpu_core.trace.profile() as profiler:
        model(x)
        torch.cuda.synchronize()
    names = {event.name for event in profiler.events()}
    assert {"mgpu forward rank 0", "mgpu forward rank 1"} <= names
