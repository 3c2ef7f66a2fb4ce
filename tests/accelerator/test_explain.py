"""A trace of fake devices: whose bytes went where, by the torch backend and by the core's cuda backend."""

import os

import pytest
import torch
from fakes.accelerator import fakes
from fakes.nets import whole
from fakes.tensors import numbers
from torch import nn

import mgpu_core
from mgpu_core.tools.explain.phases import moved_nbytes
from mgpu_core.trace.events import BETWEEN, ROOT

BY_CUDA = os.environ.get("MGPU_TEST_FAKE") == "cuda"


def calls_of(step, operation):
    return [call for call in step.collectives if call.operation == operation]


@pytest.mark.several_ranks
def test_a_forward_and_its_backward(ranks):
    net = whole(nn.Linear(2, 2)).to("fake:0")
    model = mgpu_core.DataParallel(net, fakes(ranks))
    with mgpu_core.explain() as trace:
        model(numbers(8, 2, device="fake:0")).sum().backward()
    step = trace.step()
    assert step.devices == tuple(fakes(ranks))
    nbytes = 4 * (2 * 2 + 2)
    (broadcast,), (reduce,) = calls_of(step, "broadcast"), calls_of(step, "reduce")
    assert broadcast.nbytes == (0, *[nbytes] * (ranks - 1))
    assert reduce.nbytes == (nbytes,) * ranks
    assert moved_nbytes(broadcast) == nbytes * (ranks - 1)
    for call in step.collectives:
        assert call.devices == tuple(fakes(ranks))
        assert moved_nbytes(call) > 0
        assert set(call.times) == set(fakes(ranks))
    assert {rank for hop in reduce.hops for rank, _, _ in hop.sources} == set(range(ranks))
    assert {rank for hop in reduce.hops for rank, _, _ in hop.targets} == {ROOT}
    assert sorted(span.rank for span in step.spans if span.step == "forward") == list(range(ranks))
    assert "fake:1" in trace.table()


@pytest.mark.several_ranks
@pytest.mark.parametrize("algorithm", ["ring", "direct", "naive"])
def test_hops_of_an_all_reduce(ranks, algorithm):
    tensors = [torch.ones(4 * ranks, device=device) for device in fakes(ranks)]
    with mgpu_core.explain() as trace:
        mgpu_core.comm.all_reduce(tensors, algorithm=algorithm)
    (call,) = trace.step().collectives
    if BY_CUDA:
        assert call.route == algorithm
        assert moved_nbytes(call) == 2 * (ranks - 1) * 16 * ranks
        assert all(hop.stream.startswith("cuda:") for hop in call.hops)
    else:
        assert call.route == "generic"
        assert [hop.sums for hop in call.hops] == [True, *[False] * ranks]
        assert call.hops[0].targets[0][0] == BETWEEN


def test_parts_are_where_the_first_call_has_moved_them():
    """Registered in another order than called: the layers are placed anew, and the call runs again."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.first = nn.Linear(3, 1), nn.Linear(2, 3)

        def forward(self, x):
            return self.second(self.first(x))

    net = mgpu_core.place(Net(), fakes(2))
    with torch.no_grad(), mgpu_core.explain() as trace:
        net(numbers(4, 2, device="fake:0"))
    (module,) = trace.step().parts
    assert [(str(device), layers) for device, layers, _ in module.parts] == [
        ("fake:0", ("first",)),
        ("fake:1", ("second",)),
    ]
    assert [nbytes for *_, nbytes in module.parts] == [4 * (2 * 3 + 3), 4 * (3 + 1)]


def test_a_step_between_devices(tmp_path):
    net = whole(nn.Linear(2, 2)).to("fake:0")
    step = mgpu_core.TrainStep(
        net,
        lambda output, y: (output * y).mean(),
        torch.optim.SGD(net.parameters(), 0.5),
        ["fake:0", "fake:0", "fake:1"],
    )
    x, y = numbers(6, 2, device="fake:0"), numbers(6, 2, device="fake:0")
    step(x, y)
    with mgpu_core.explain() as trace:
        step(x, y)
    step.close()
    reduces, (between,) = calls_of(trace.step(), "reduce"), calls_of(trace.step(), "all_reduce")
    assert [call.ranks for call in reduces] == [(0, 1), (2,)]  # the ranks of each device by their own numbers
    assert (between.devices, between.ranks) == (("fake:0", "fake:1"), (0, 2))  # each device by its first rank
    assert {trace.step().bucket_of(call) for call in (*reduces, between)} == {0}
    trace.save_html(tmp_path / "page.html")
