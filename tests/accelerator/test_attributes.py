"""Attributes of a step's modules on several devices: each rank's tensors lie where it computes."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD
from train.nets import Pair, batches, mse

from mgpu_core import TrainStep

TEAMS = [["fake:0", "fake:1", "fake:2"], ["fake:0", "fake:1", "fake:0"], ["fake:1", "fake:1", "fake:3", "fake:3"]]


class Weighted(nn.Module):
    """Multiplies by tensors that are no buffers."""

    def __init__(self, device):
        super().__init__()
        with torch.device(device):
            self.last = nn.Linear(4, 2).double()
            self.scale = torch.full((2,), 3.0, dtype=torch.float64)
            self.scales = {"more": [torch.ones(1, dtype=torch.float64) * self.last.bias[0]]}  # with a graph
        self.onhost = torch.ones(3, device="cpu")
        self.factor = 1.0

    def forward(self, x):
        assert self.onhost.device.type == "cpu"
        return self.last(x) * self.scale * self.scales["more"][0].detach() * self.factor


@pytest.mark.parametrize("devices", TEAMS)
def test_tensors_in_attributes_lie_on_each_ranks_device(devices):
    def change(net, i):
        if i == 1:
            net.scale = net.scale * 2
        if i == 2:
            net.scale.add_(1)
        if i == 3:
            net.scales["more"].append(net.scale)
            net.scales["more"].pop(0)
        net.factor = 1.0 + i

    torch.manual_seed(0)
    net = Weighted(devices[0])
    net.scales["more"][0] = net.scales["more"][0].detach()
    pair = Pair(net, partial(SGD, lr=0.01), devices)
    with torch.device(devices[0]):
        for i, (x, y) in enumerate(batches(5, 11)):
            change(pair.net, i)
            change(pair.alone, i)
            ours, theirs = pair.both(x, y)
            assert torch.allclose(ours, theirs)
    assert pair.far() < 1e-9
    modules = pair.step._engine.parts.replicas.modules
    assert [str(each.scale.device) for each in modules] == devices
    assert all(each.scales["more"][0] is each.scale for each in modules[1:])


def test_a_tensor_with_a_graph_may_be_there_from_the_start():
    net = Weighted("fake:0")
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.01), ["fake:0", "fake:1"])
    (x, y), *_ = batches(1, 6)
    expected = mse(net(x.to("fake:0")), y.to("fake:0")).detach()
    assert torch.allclose(step(x.to("fake:0"), y.to("fake:0")), expected)
    assert step._engine.parts.replicas.modules[1].scales["more"][0].grad_fn is None
