"""Who waits for whom where values cross from one device of a pipeline to another; here the fakes are GPUs."""

import threading
from types import MethodType

import pytest
import torch
from fakes.accelerator import device_module
from fakes.as_gpus import gpus, id_of, waits  # noqa: F401
from fakes.stacks import mse
from fakes.threads import at_once
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_core import Pipeline, TrainStep, optim, place
from mgpu_core.devices import streams

pytestmark = pytest.mark.usefixtures("gpus")
DEVICES = ["fake:0", "fake:1"]


def crossings(source, target):
    """Both waits of a copy: it waits for those who compute on the source, and those on the target wait for it."""
    computing = [id_of(torch.accelerator.current_stream(each)) for each in DEVICES]
    aside = [id_of(streams.own_stream("copies", each)) for each in (0, 1)]
    return {(aside[source], computing[source]), (computing[target], aside[target])}


def linears():
    return [nn.Linear(2, 2), nn.Linear(2, 2)]


def rows():
    return torch.ones(4, 2, device="fake:0")


@pytest.mark.parametrize("cut", [lambda net: Pipeline(net, DEVICES, chunks=2), lambda net: place(net, DEVICES, ["1"])])
def test_a_value_and_its_gradient_are_waited_for(cut):
    net = cut(nn.Sequential(*linears()))
    x = rows()
    waits()
    output = net(x)
    assert crossings(0, 1) <= set(waits())
    output.sum().backward()
    assert crossings(1, 0) <= set(waits())


class Written(nn.Module):
    """The second layer writes its argument, which the forward returns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.register_forward_hook(lambda _, args, output: args[0].copy_(output))

    def forward(self, x):
        h = self.first(x)
        self.second(h)
        return h


def test_an_argument_that_a_layer_has_written_is_waited_for():
    net = place(Written().to("fake:0"), DEVICES, ["second"])
    with torch.no_grad():
        net(rows())
        waits()
        net(rows())
        assert crossings(1, 0) <= set(waits())


def test_a_gradient_goes_back_to_the_stream_of_the_forward():
    net, x, own = Pipeline(nn.Sequential(*linears()), DEVICES, chunks=1), rows(), torch.Stream("fake:0")
    with own:
        output = net(x)
    waits()
    output.sum().backward()
    assert (id_of(own), id_of(streams.own_stream("copies", 0))) in waits()


def test_a_second_derivative_crosses_the_border_too():
    net, x = Pipeline([nn.Linear(2, 2), nn.Tanh()], DEVICES, chunks=1), rows().requires_grad_()
    whole = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).to("fake:0")
    whole.load_state_dict(net.state_dict())
    for module in (net, whole):
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert torch.allclose(net.module[0].weight.grad, whole[0].weight.grad)


class Crossing(nn.Module):
    """Sends a value with a gradient, one without, one that is on the next device already, and a device."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Starting(2, 2), Adding()

    def forward(self, x):
        computed, device, host = self.first(x)
        return self.last(computed, x, x.to("fake:1"), device, host)


class Starting(nn.Linear):
    def forward(self, x):
        return super().forward(x), x.device, torch.device("cpu")


class Adding(nn.Module):
    def forward(self, computed, x, moved, device, host):
        assert {str(each.device) for each in (computed, x, moved)} == {"fake:1"}
        assert (str(device), str(host)) == ("fake:1", "cpu")
        return computed + x + moved + torch.ones(2, device=device)


@pytest.mark.parametrize("with_grad", [True, False])
def test_all_kinds_of_values_reach_the_next_device(with_grad):
    module, x = Crossing(), rows()
    net = Pipeline(module, DEVICES, split_points=["last"], chunks=2)
    with torch.set_grad_enabled(with_grad):
        output = net(x)
    assert output.requires_grad == with_grad
    assert torch.allclose(output.cpu(), (module.first(x)[0] + x + x + 1).detach().cpu())


def test_in_a_training_step_too():
    net = nn.Sequential(*linears())
    step = TrainStep(Pipeline(net, DEVICES, chunks=2), mse, optim.SGD(net.parameters(), lr=0.1))
    x = rows()
    waits()
    step(x, x)
    assert crossings(0, 1) | crossings(1, 0) <= set(waits())


class Noting(nn.Linear):
    """Notes the memory of the weight that it computes with, and the stream."""

    def forward(self, x):
        self.seen.append((self.weight.data_ptr(), torch.accelerator.current_stream(x.device).stream_id))
        return super().forward(x)


@pytest.mark.parametrize("way", ["loop", "step", "place"])
def test_a_copy_of_a_shared_parameter_is_waited_for_and_kept(way):
    first, last = Noting(2, 2), Noting(2, 2)
    last.weight = first.weight
    first.seen, last.seen = [], []
    net = nn.Sequential(first, last)
    model = place(net, DEVICES, ["1"]) if way == "place" else Pipeline(net, DEVICES, chunks=1)
    step = TrainStep(model, mse, optim.SGD(net.parameters(), lr=0.1)) if way == "step" else None
    x = rows()
    device_module.built.take_recorded()
    step(x, x) if step else model(x)
    (copy,) = last.seen
    assert copy[0] != first.weight.data_ptr()
    assert copy in device_module.built.take_recorded()


def test_gradients_of_a_copy_are_added_after_they_have_come():
    first, last = linears()
    last.weight = first.weight
    step = TrainStep(Pipeline([first, last], DEVICES, chunks=1), mse, torch.optim.SGD([first.weight], lr=0.0))
    x = rows()
    step(x, x)
    wanted = nn.Sequential(*linears())
    wanted[0].load_state_dict(first.state_dict())
    wanted[1].load_state_dict(last.state_dict())
    wanted[1].weight = wanted[0].weight
    wanted.to("fake:0")
    mse(wanted(x), x).backward()
    assert torch.allclose(first.weight.grad, wanted[0].weight.grad)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(2, 2), nn.Linear(2, 2), nn.Dropout(0.5)

    def forward(self, x):
        return checkpoint(lambda y: self.drop(self.last(self.first(y))), x, use_reentrant=False)


def test_a_checkpoint_around_a_border_that_draws_is_refused():
    net = Pipeline(Dropping(), DEVICES, split_points=["last"], chunks=2)
    with pytest.raises(RuntimeError, match="a checkpoint is around the border before stage 1"):
        net(rows())
    assert net.eval()(rows()).shape == (4, 2)


def test_a_step_over_a_placed_module_asks_for_the_pipeline():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    place(net, DEVICES, ["1"])
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    for devices in (DEVICES[:1], DEVICES, None):
        with pytest.raises(
            RuntimeError, match=r"net's parts are on several devices, .*: pass the Pipeline to the step"
        ):
            TrainStep(net, mse, optimizer, devices)


class Tied(nn.Module):
    """Its last layer has the weight of the first, and notes the rows of each call."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), Last(2, 2, bias=False)
        self.last.weight = self.first.weight
        self.at_first = lambda: None

    def forward(self, x):
        self.at_first()
        return self.last(torch.tanh(self.first(x)))


class Last(nn.Linear):
    rows, inside = None, staticmethod(lambda: None)

    def forward(self, x):
        self.inside()
        self.rows = x.size(0)
        return super().forward(x)


def tied(devices=DEVICES):
    """A placed net, and another one on the first device."""
    net, alone = Tied(), Tied()
    alone.load_state_dict(net.state_dict())
    return place(net, devices, ["last"]), alone.to(devices[0])


@pytest.mark.parametrize("devices", [DEVICES, ["cpu", "fake:0"]], ids=str)
@pytest.mark.parametrize("with_grad", [True, False])
def test_a_call_that_begins_while_another_computes_with_a_shared_parameter(devices, with_grad):
    placed, alone = tied(devices)
    x = torch.arange(8.0, device=devices[0]).view(4, 2)
    placed(x)
    inside, begun = threading.Event(), threading.Event()

    def in_last():
        if not inside.is_set():
            inside.set()
            assert begun.wait(20), "the other call did not begin"

    def first():
        placed.last.inside = in_last
        assert torch.equal(placed(x), alone(x))

    def second():
        assert inside.wait(20)
        placed.at_first = begun.set
        assert torch.equal(placed(x[:3]), alone(x[:3]))

    def of(work):
        with torch.set_grad_enabled(with_grad):
            work()

    at_once(lambda: of(first), lambda: of(second))
    assert placed.last.weight is placed.first.weight


def copies_of(call):
    device_module.built.take_direct_copies()
    call()
    return len(device_module.built.take_direct_copies())


def test_calls_without_gradients_share_a_copy_of_a_shared_parameter():
    placed, alone = tied()
    x, (weight, other) = rows(), (placed.first.weight, alone.first.weight)

    @torch.no_grad()
    def call():
        assert torch.equal(placed(x), alone(x))
        assert placed.last.rows == len(x)

    call()
    placed.last.rows = None
    assert [copies_of(call) for _ in range(3)] == [3, 2, 2]  # to the last layer and back; and the weight
    for each in (weight, other):
        with torch.no_grad():
            each.mul_(2)
    assert [copies_of(call) for _ in range(2)] == [3, 2]
    for each in (weight, other):
        each.data = each.data * 2
    assert [copies_of(call) for _ in range(2)] == [3, 2]
    placed(x).sum().backward()
    alone(x).sum().backward()
    assert torch.equal(weight.grad, other.grad)
    for each in (weight, other):
        each.data.sub_(each.grad)  # as optimizers do whose authors did not know of versions
    assert [copies_of(call) for _ in range(2)] == [3, 2]


def test_a_thread_on_its_own_stream_waits_for_the_copy_that_another_has_made():
    placed, _ = tied()
    x, own = rows(), torch.Stream("fake:1")
    with torch.no_grad():
        placed(x), placed(x)
        waits(), device_module.built.take_recorded()
        with own:
            placed(x)
    assert (id_of(own), id_of(torch.accelerator.current_stream("fake:1"))) in waits()
    weights = [stream for pointer, stream in device_module.built.take_recorded() if stream == own.stream_id]
    assert len(weights) == 2  # the input of the last layer, and the weight
    with torch.no_grad(), own:
        placed.first.weight.mul_(2)
        waits(), placed(x)  # this thread makes the copy anew
    assert waits().count((id_of(own), id_of(streams.own_stream("copies", 1)))) == 2


def give_forward(layer):
    layer.forward = MethodType(lambda self, x: x @ self.weight, layer)


@pytest.mark.parametrize("is_before", [True, False])
def test_a_layer_with_a_shared_parameter_that_was_given_another_forward(is_before):
    net, alone = Tied(), Tied()
    alone.load_state_dict(net.state_dict())
    give_forward(alone.last)
    if is_before:
        give_forward(net.last)
    placed = place(net, DEVICES, ["last"])
    if not is_before:
        give_forward(net.last)
    for _ in range(2):
        assert torch.equal(placed(rows()), alone(rows()))


def current():
    return torch.accelerator.current_device_index()


class Where(nn.Linear):
    """Notes the current device, with that of its input."""

    def forward(self, x):
        self.seen.append((x.device.index, current()))
        assert len(x) < 9, "too many rows"
        return super().forward(x)


class Around(nn.Module):
    """Notes them in the code between layers, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.seen = Where(2, 2), Where(2, 2), []
        self.first.seen = self.last.seen = self.seen

    def forward(self, x):
        for each in (self.first, self.last):
            self.seen.append((x.device.index, current()))
            x = checkpoint(each, x, use_reentrant=False)
        self.seen.append((x.device.index, current()))
        return x


def test_the_device_of_a_layer_is_current_in_it():
    """Kernels of Triton and of extensions start on the current one; also in a backward, and in one layer by itself."""
    net = place(Around(), ["fake:2", "fake:1"], ["last"])
    x = torch.ones(4, 2, device="fake:0")
    with torch.accelerator.device_index(3):
        for _ in range(2):
            net.seen.clear()
            output = net(x.to("fake:2"))
            assert net.seen == [(2, 2), (2, 2), (2, 2), (1, 1), (1, 1)]
            assert current() == 3
        net.seen.clear()
        output.sum().backward()
        net.first(x), net.last(x)
        assert net.seen == [(1, 1), (2, 2), (2, 2), (1, 1)]
        with pytest.raises(AssertionError, match="too many rows"):
            net(torch.ones(9, 2, device="fake:2"))
        assert current() == 3
        place(Around(), ["fake:0", "cpu"], ["last"])(x)
        assert current() == 3


class First(nn.Linear):
    """Notes how many copies to the next stage have begun when it is called."""

    def forward(self, x):
        self.begun.append(len([pair for pair in waits_so_far() if pair == self.copying]))
        if len(self.begun) == 3:
            self.third.set()
        return super().forward(x)


class Held(nn.Linear):
    """Launches nothing until the first layer was called for a third time."""

    def forward(self, x):
        assert self.third.wait(20)
        return super().forward(x)


def waits_so_far():
    WAITS.extend((copies, ((a, b), (c, d))) for a, b, c, d, copies in device_module.built.take_waits())
    return [pair for _, pair in WAITS]


WAITS = []


@pytest.mark.parametrize("way", ["forward", "with_grad", "step", "place"])
def test_a_copy_begins_before_later_micro_batches_are_launched(way):
    """And the next stage waits for that copy alone: for no later one, which comes after later work."""
    net = nn.Sequential(First(2, 2), Held(2, 2))
    net[0].begun, net[0].third = [], threading.Event()
    net[1].third = net[0].third
    net[0].copying = id_of(streams.own_stream("copies", 0)), id_of(torch.accelerator.current_stream("fake:0"))
    if way == "place":
        placed = place(net, DEVICES, ["1"])
        net[0].third.set()
        placed(rows()), placed(rows())
        run = lambda: at_once(*[lambda: placed(rows())] * 3)  # noqa: E731
    else:
        pipe = Pipeline(net, DEVICES, split_points=["1"], chunks=3, schedule="gpipe")
        step = TrainStep(pipe, mse, optim.SGD(net.parameters(), lr=0.1)) if way == "step" else pipe
        arguments = [torch.ones(6, 2, device="fake:0")] * (2 if way == "step" else 1)

        def run():
            with torch.set_grad_enabled(way != "forward"):
                step(*arguments)

        net[0].third.set()
        run()
    net[0].third.clear()
    net[0].begun.clear()
    waits_so_far()
    WAITS.clear()
    device_module.built.take_direct_copies()
    run()
    assert net[0].begun == [0, 1, 2]
    waits_so_far()
    wanted = id_of(torch.accelerator.current_stream("fake:1")), id_of(streams.own_stream("copies", 1))
    known = 2 if way in ("place", "step") else 3  # their outputs and gradients go back
    behind = [copies for copies, pair in WAITS if pair == wanted][:known]
    assert [copies - behind[0] for copies in behind] == [0, 1, 2][:known]


def test_micro_batches_compute_and_copy_on_the_streams_of_the_caller():
    pipe = Pipeline(nn.Sequential(*linears()), DEVICES, chunks=2)
    x, own = rows(), [torch.Stream(each) for each in DEVICES]
    pipe(x)
    computing = {id_of(torch.accelerator.current_stream(each)) for each in DEVICES}
    waits()
    with streams.on_all([torch.device(each) for each in DEVICES], own):
        pipe(x)
        assert crossings(0, 1) <= set(found := waits())
    assert not computing & {each for pair in found for each in pair}
