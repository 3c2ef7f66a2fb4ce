"""Tensors that belong to no layer, that move, or that a graph holds; on the fake accelerator devices really differ."""

import copy

import pytest
import torch
from fakes.nets import cpu
from pipeline.own_code import Block, Plain
from torch.utils.checkpoint import checkpoint

from mgpu_core import Pipeline, TrainStep, place

ROWS = 8
FIRST = cpu(1)[0]
differ = pytest.mark.skipif(cpu(2)[0] == cpu(2)[1], reason="CPU ranks are one device")


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 8, dtype=torch.float64, generator=generator, device="cpu").to(FIRST)


def made(kind):
    torch.manual_seed(0)
    return kind().to(FIRST)


class LateBuffer(Plain):
    """A buffer of the module that code after the layers uses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, 8, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x) * self.scale


class ReplacedBuffer(LateBuffer):
    """A forward assigns it anew."""

    def forward(self, x):
        self.scale = self.scale * 1.0
        return super().forward(x)


class LeafOnTheWay(Plain):
    """As peft lets the output of a frozen embedding require gradients."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class LeafThatCrosses(Plain):
    def forward(self, x):
        leaf = x.detach().clone().requires_grad_()
        return super().forward(leaf) + leaf


KINDS = [LateBuffer, ReplacedBuffer, LeafOnTheWay, LeafThatCrosses]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_those_of_one_device(kind, stages):
    net, whole = made(kind), made(kind)
    pipe = Pipeline(net, cpu(stages), chunks=2)
    step = TrainStep(pipe, lambda output, target: output.square().mean(), torch.optim.SGD(net.parameters(), lr=0.0))
    for _ in range(3):
        whole.zero_grad()
        for part in batch().tensor_split(2):
            (whole(part).square().mean() / 2).backward()
        step(batch(), batch())
        for one, other in zip(net.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(one.grad.cpu(), other.grad.cpu(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cut", [lambda net: Pipeline(net, cpu(2), chunks=2), lambda net: place(net, cpu(2))])
def test_buffers_stay_the_same_objects(cut):
    net = made(LateBuffer)
    before = net.scale
    with torch.no_grad():
        cut(net)(batch())
    assert net.scale is before
    assert str(before.device) == cpu(2)[1]  # after the layers


class Remembering(Block):
    def forward(self, x, memory):
        memory.kept = x if memory.kept is None else memory.kept + x
        return super().forward(x)


class Memory:
    def __init__(self):
        self.kept, self.calls = None, []


class CalledBackwards(Plain):
    """Layers fill an object of the caller, as those of a decoder fill a cache."""

    def __init__(self):
        super().__init__(Remembering)

    def forward(self, x, memories):
        for index in (2, 3, 0, 1):
            memories[index].calls.append(index)
            x = self.blocks[index](x, memories[index])
        return x


class CalledLater(Plain):
    def forward(self, x):
        for index in (2, 3, 0, 1):
            x = self.blocks[index](x)
        return x


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_first_call_that_places_layers_anew_leaves_caches_where_layers_are(parts):
    net, whole = made(CalledBackwards), made(CalledBackwards)
    place(net, cpu(parts))
    own, wanted = [Memory() for _ in range(4)], [Memory() for _ in range(4)]
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(net(batch(), own).cpu(), whole(batch(), wanted).cpu(), rtol=0, atol=1e-12)
    for index, (one, other) in enumerate(zip(own, wanted, strict=True)):
        assert one.calls == other.calls
        assert torch.allclose(one.kept.cpu(), other.kept.cpu())
        assert one.kept.device == net.blocks[index].linear.weight.device


def test_outputs_are_where_the_inputs_are():
    net = place(made(Plain), cpu(2))
    for device in cpu(2):
        x = batch().to(device)
        loss = (net(x) - x).square().mean()  # a loss outside
        loss.backward()
        assert loss.device == x.device


def test_a_copy_of_the_net_in_a_pipeline_runs_where_its_layers_are():
    net, whole = made(Plain), made(Plain)
    Pipeline(net, cpu(2), chunks=2)(batch())
    copied = copy.deepcopy(net)
    assert torch.allclose(copied(batch()).cpu(), whole(batch()).cpu())
    copied.to(cpu(2)[1])
    assert torch.allclose(copied(batch().to(cpu(2)[1])).cpu(), whole(batch()).cpu())


@differ
@pytest.mark.parametrize("cut", [lambda net: Pipeline(net, cpu(2), chunks=2), lambda net: place(net, cpu(2))])
def test_a_net_that_a_graph_holds_is_not_moved_by_half(cut):
    net = Plain().cpu()
    output = net(batch().cpu())
    with pytest.raises(RuntimeError, match=r"blocks.1.linear.weight cannot be moved .* nothing was moved"):
        cut(net)
    assert {each.device.type for each in net.parameters()} == {"cpu"}
    output.sum().backward()
    del output
    cut(net)(batch())


def test_a_first_call_in_inference_mode_leaves_weights_that_can_be_trained():
    net, whole = made(CalledLater), made(CalledLater)
    place(net, cpu(2))
    with torch.inference_mode():
        assert torch.allclose(net(batch()).cpu(), whole(batch()).cpu())
    net(batch()).sum().backward()
    whole(batch()).sum().backward()
    assert torch.allclose(net.blocks[0].linear.weight.grad.cpu(), whole.blocks[0].linear.weight.grad.cpu())


@pytest.mark.parametrize("index", [0, 1])
def test_a_part_on_the_cpu_trains_where_the_first_step_shows_another_order(index):
    net, whole = made(CalledLater), made(CalledLater)
    devices = cpu(2)
    devices[index] = "cpu"
    pipe = Pipeline(net, devices, chunks=2)
    step = TrainStep(pipe, lambda output, target: output.square().mean(), torch.optim.SGD(net.parameters(), lr=0.0))
    x = batch().to(devices[0])
    for _ in range(2):
        step(x, x)
    for part in batch().tensor_split(2):
        (whole(part).square().mean() / 2).backward()
    for one, other in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(one.grad.cpu(), other.grad.cpu(), rtol=0, atol=1e-12)
