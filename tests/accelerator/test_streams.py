"""Who waits for whom on the side streams, in the code that GPUs run: here the fakes are the devices of that type."""

import threading
import weakref
from functools import partial
from typing import ClassVar, get_args

import pytest
import torch
from fakes.accelerator import device_module
from fakes.as_gpus import gpus, id_of, waits  # noqa: F401
from step.nets import mse
from torch import nn
from torch.optim import SGD

from mgpu_core import TrainStep, comm, convert_sync_batchnorm, parallel_apply, replicate
from mgpu_core.comm import autograd, collectives, dispatch
from mgpu_core.devices import streams
from mgpu_core.optim import AdamW
from mgpu_core.step.grad_buckets import GradBuckets

DEVICES = ["fake:0", "fake:1"]


pytestmark = pytest.mark.usefixtures("gpus")


def has_waited(waiter, awaited):
    return (id_of(waiter), id_of(awaited)) in waits()


def test_copies_from_the_host_are_made_beside_the_computing(monkeypatch):
    seen = []
    scatter_into = comm.dispatch.scatter_into

    def scattered(*arguments):
        seen.extend(torch.accelerator.current_stream(each) for each in DEVICES)
        scatter_into(*arguments)

    monkeypatch.setattr(comm.dispatch, "scatter_into", scattered)
    parts = comm.scatter(torch.arange(6.0, device="cpu"), DEVICES)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]
    assert seen == [streams.own_stream("copies", 0), streams.own_stream("copies", 1)]
    assert torch.accelerator.current_stream("fake:1") != seen[1]


def test_who_computes_with_copies_waits_for_them():
    own = torch.Stream("fake:1")
    with own:
        comm.scatter(torch.arange(6.0, device="cpu"), DEVICES)
    assert has_waited(own, streams.own_stream("copies", 1))


def test_memory_of_copies_is_not_given_away_before_they_were_used():
    own = torch.Stream("fake:1")
    device_module.built.take_recorded()
    with own:
        _, part = comm.scatter(torch.arange(6.0, device="cpu"), DEVICES)
    assert (part.data_ptr(), own.stream_id) in device_module.built.take_recorded()


def test_each_thread_gets_its_own_stream_back():
    """Two threads are on one stream of the package at a time, as in two steps; the one that came first leaves first."""
    device, shared = torch.device("fake", 0), streams.own_stream("copies", 0)
    own = [torch.Stream(device) for _ in range(2)]
    inside, first_has_left, found = [threading.Event() for _ in own], threading.Event(), {}

    def work(index):
        torch.accelerator.set_stream(own[index])
        assert index == 0 or inside[0].wait(20)
        with streams.on(device, shared):
            inside[index].set()
            assert (inside[1] if index == 0 else first_has_left).wait(20)
        found[index] = torch.accelerator.current_stream(device)
        if index == 0:
            first_has_left.set()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == dict(enumerate(own))


def test_the_backward_of_synchronised_layers_waits_for_gradients_of_other_streams():
    """As every backward over several devices: autograd orders the gradients with the stream of one device alone."""
    devices, own = [torch.device(each) for each in DEVICES], [torch.Stream(each) for each in DEVICES]
    net = convert_sync_batchnorm(nn.BatchNorm1d(2)).to("fake:0")
    xs = [torch.arange(8.0).view(4, 2).to(each).requires_grad_() for each in DEVICES]
    with streams.on_all(devices, own):
        outs = parallel_apply(replicate(net, DEVICES), [(x,) for x in xs], devices=DEVICES)
    seen = []

    def begin(gradients):
        waits()  # those before this node

    outs[0].grad_fn.register_prehook(begin)
    outs[0].grad_fn.register_hook(lambda *gradients: seen.extend(waits()))
    torch.autograd.backward([out.square().sum() for out in outs])
    assert (id_of(own[1]), id_of(own[0])) in seen


class OnAStreamOfItsOwn(nn.Module):
    """Its parameters are used, and so have their gradients, on another stream than the rank's."""

    made: ClassVar[dict[int, torch.Stream]] = {}  # by thread: each rank has one

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        stream = torch.Stream(x.device)
        self.made[threading.get_ident()] = stream
        hidden = self.first(x)
        stream.wait_stream(torch.accelerator.current_stream(x.device))
        with stream:
            out = self.second(hidden)
        torch.accelerator.current_stream(x.device).wait_stream(stream)
        return out


def test_sums_wait_for_the_streams_that_gradients_were_made_on():
    net = OnAStreamOfItsOwn().to("fake:0")
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), ["fake:0", "fake:0"], bucket_nbytes=4, workers="threads")
    x, y = torch.ones(4, 2), torch.ones(4, 1)
    for _ in range(2):
        waits()
        step(x, y)
    side = streams.own_stream("sums", 0)
    found = waits()
    assert len(net.made) == 2
    assert all((id_of(side), id_of(stream)) in found for stream in net.made.values())
    assert (id_of(side), id_of(torch.accelerator.current_stream("fake:0"))) in found


def test_a_step_goes_on_behind_its_sums():
    net = nn.Linear(2, 1).to("fake:0")
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), DEVICES, bucket_nbytes=4)
    for _ in range(2):
        waits()
        step(torch.ones(4, 2), torch.ones(4, 1))
    found = waits()
    for device in (0, 1):
        current = torch.accelerator.current_stream(torch.device("fake", device))
        assert (id_of(current), id_of(streams.own_stream("sums", device))) in found


def test_gradients_are_let_go_when_who_computes_has_waited_for_their_sum(monkeypatch):
    """The memory of a gradient is free for the computing stream as soon as the next sum is launched."""
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]).to("fake:0")
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), DEVICES, workers="caller", bucket_nbytes=1)
    batch = [torch.ones(8, 64, device="cpu")] * 2
    step(*batch)
    waits()
    seen, add_ranks = [], GradBuckets.add_ranks

    def noted(self, bucket, index, columns, **settings):
        if index == 1:
            seen.append((weakref.ref(columns[1][0]), waits()))
        return add_ranks(self, bucket, index, columns, **settings)

    monkeypatch.setattr(GradBuckets, "add_ranks", noted)
    alive = []
    for layer in net:
        layer.register_full_backward_hook(lambda *_: alive.append(sum(one() is not None for one, _ in seen)))
    step(*batch)
    assert len(seen) == 6
    assert max(alive) <= 2, "of one rank: one bucket in a sum, and one before"
    sums, now = streams.own_stream("sums", 1), torch.accelerator.current_stream("fake:1")
    assert all((id_of(now), id_of(sums)) in waited for _, waited in seen[1:])
    assert has_waited(now, sums), "in the end, too"


def test_nobody_waits_for_sums_of_a_capture_that_are_not_in_it():
    """CUDA refuses a wait for a stream that has not waited for a stream of the capture."""
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).to("fake:0")
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), ["fake:0"] * 2, workers="caller", bucket_nbytes=1)
    batch = [torch.ones(6, 4, device="cpu")] * 2
    step(*batch)
    own, side = streams.CaptureStream(0), id_of(streams.own_stream("sums of a capture", 0))
    for _ in range(2):
        waits()
        with streams.on(torch.device("fake:0"), own.stream):
            step(*batch)
        found = waits()
        assert (id_of(own.stream), side) in found
        assert found.index((side, id_of(own.stream))) < found.index((id_of(own.stream), side))


def test_blocks_in_shards_are_filled_beside_the_computing(monkeypatch):
    """While a block computes, the next one is filled; the stream that computes waits for its own block alone."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), nn.Linear(8, 8))
    step = TrainStep(
        net.to("fake:0"), mse, AdamW(net.parameters()), DEVICES, shard="parameters", workers="caller", bucket_nbytes=1
    )
    blocks, batch = net[1], [torch.ones(8, 8, device="cpu")] * 2
    step(*batch)
    filled, seen, gather_into = [], [], dispatch.gather_into

    def fill(parts, out, dim):
        filled.append((out.device.index, torch.accelerator.current_stream(out.device)))
        gather_into(parts, out, dim)

    def entered(block, _):
        here = [stream for device, stream in filled if device == 0]
        seen.append((list(blocks).index(block), len(here), waits()))

    monkeypatch.setattr(dispatch, "gather_into", fill)
    hooks = [block.register_forward_pre_hook(entered) for block in blocks]
    waits()
    step(*batch)
    for hook in hooks:
        hook.remove()
    copies = [streams.own_stream("copies", index) for index in range(2)]
    assert filled
    assert all(stream == copies[index] for index, stream in filled)
    assert [count for _, count, _ in seen[:3]] == [3, 4, 5], "the root, this block and those before, and the next one"
    now = id_of(torch.accelerator.current_stream("fake:0"))
    assert all((now, id_of(copies[0])) in waited for _, _, waited in seen[:4])


def test_no_stream_of_the_users_is_one_of_ours():
    held = streams.CaptureStream(1)
    ours = [*(streams.own_stream(purpose, 1) for purpose in get_args(streams.Purpose)), held.stream]
    users = [torch.Stream("fake:1") for _ in range(100)]
    assert len(set(users)) == 32
    assert len(set(ours)) == 4
    assert not set(ours) & set(users)


@pytest.mark.parametrize("name", ["scatter_into", "gather_into", "reduce_batch", "broadcast", "all_reduce_into"])
def test_backwards_go_on_on_the_streams_of_the_forward(monkeypatch, name):
    """The one of each device, which waits for the one that autograd has ordered the gradients with."""
    devices, own = [torch.device(each) for each in DEVICES], [torch.Stream(each) for each in DEVICES]
    x = torch.ones(4, 2, device="fake:0", requires_grad=True)
    with streams.on_all(devices, own):
        outs = {
            "gather_into": lambda: autograd.scatter(x, devices, [2, 2], 0),
            "scatter_into": lambda: [autograd.gather([x, x.to("fake:1")], devices[0], 0)],
            "reduce_batch": lambda: [each for row in autograd.broadcast_buckets(devices, [x]) for each in row],
            "broadcast": lambda: autograd.reduce_tensors([[x], [x.to("fake:1")]], devices[0]),
            "all_reduce_into": lambda: collectives.all_reduce([x, x.to("fake:1")]),
        }[name]()
    seen, collective = [], getattr(dispatch, name)

    def noted(*arguments, **options):
        seen.extend(map(torch.accelerator.current_stream, devices))
        return collective(*arguments, **options)

    monkeypatch.setattr(dispatch, name, noted)
    waits()
    torch.autograd.backward([out.sum() for out in outs])
    assert seen == own
    assert x.grad.tolist() == [[{"gather_into": 1.0, "all_reduce_into": 4.0}.get(name, 2.0)] * 2] * 4
    assert has_waited(own[1], own[0])


@pytest.mark.parametrize("collective", [collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter])
def test_differentiable_collectives_go_back_on_the_streams_of_the_forward(monkeypatch, collective):
    devices, own = [torch.device(each) for each in DEVICES], [torch.Stream(each) for each in DEVICES]
    leaves = [torch.ones(4, 2, device=each, requires_grad=True) for each in devices]
    with streams.on_all(devices, own):
        outs = collective(leaves)
    seen = []

    def noted(function, *arguments, **options):
        seen.append([torch.accelerator.current_stream(each) for each in devices])
        return function(*arguments, **options)

    for name in ("all_reduce_into", "gather", "reduce_batch"):
        monkeypatch.setattr(dispatch, name, partial(noted, getattr(dispatch, name)))
    torch.autograd.backward([out.sum() for out in outs])
    assert seen
    assert all(each == own for each in seen)
