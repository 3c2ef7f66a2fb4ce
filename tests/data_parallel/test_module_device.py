"""Devices of the module: where it must be, and the plain module on one device or none."""

import threading

import pytest
import torch
from fakes.nets import Spy, cpu, mlp
from fakes.tensors import numbers
from fakes.wrapper import Lambda
from torch import nn

from mgpu_core import DataParallel, Replicate, _core, data_parallel


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
@pytest.mark.several_ranks
@pytest.mark.parametrize("what", ["parameter", "buffer"])
@pytest.mark.parametrize("functional", [False, True])
def test_module_on_the_wrong_device(ranks, what, functional):
    net = mlp()
    if what == "parameter":
        net[4].bias = nn.Parameter(torch.ones(3, device="meta"))
    else:
        net[0].register_buffer("table", torch.ones(2, device="meta"))
    wrapper = DataParallel(net, cpu(ranks))
    with pytest.raises(RuntimeError) as caught:
        data_parallel(net, torch.ones(3, 4), cpu(ranks)) if functional else wrapper(torch.ones(3, 4))
    assert str(caught.value) == (
        "module must have its parameters and buffers on device cpu (device_ids[0]) "
        "but found one of them on device: meta"
    )


class Moved(nn.Linear):
    moves: tuple = ()

    def to(self, *args, **kwargs):
        self.moves = (*self.moves, args)
        return super().to(*args, **kwargs)


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
def test_the_constructor_moves_the_module_for_one_device_only():
    one, two = Moved(2, 2), Moved(2, 2)
    DataParallel(one, cpu(1))
    DataParallel(two, cpu(2))
    assert one.moves == ((torch.device("cpu"),),)
    assert two.moves == ()


def test_default_devices_are_the_cpu_ranks_of_the_environment_or_the_plain_module(monkeypatch):
    if torch.accelerator.is_available():
        pytest.skip("there are accelerators, which come first")
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "3")
    spy = Spy()
    DataParallel(spy)(numbers(6, 2))
    assert len(spy.seen) == 3
    monkeypatch.delenv("MGPU_CORE_CPU_RANKS")
    spy = Spy()
    wrapper = DataParallel(spy)
    assert wrapper.device_ids == []
    wrapper(numbers(6, 2))
    assert [note["thread"] for note in spy.seen] == [threading.get_ident()]


def test_no_devices_are_a_pass_through_with_the_same_attributes():
    spy = Spy()
    wrapper = DataParallel(spy, [], dim=1, shares=None)
    assert (wrapper.module, wrapper.device_ids, wrapper.dim, wrapper.output_device) == (spy, [], 1, None)
    assert next(iter(wrapper.state_dict())).startswith("module.")
    _core.reset_counters()
    wrapper(numbers(6, 2)).sum().backward()
    assert _core.counters() == {}
    assert [len(note["rows"]) for note in spy.seen] == [6]


@pytest.mark.parametrize("ranks", [0, 1, 2])
@pytest.mark.parametrize("functional", [False, True])
def test_replicate_is_unwrapped_on_any_number_of_devices(ranks, functional):
    # What runs on eight GPUs must run on a laptop without one.
    net = Lambda(lambda self, x, table, extra: self.linear(x) @ table + extra["bias"])
    x, table, bias = numbers(4, 2), numbers(2, 2), numbers(2)
    wanted = net(x, table, {"bias": bias})
    if functional:
        kwargs = {"table": Replicate(table), "extra": {"bias": Replicate(bias)}}
        got = data_parallel(net, x, cpu(ranks), module_kwargs=kwargs)
    else:
        got = DataParallel(net, cpu(ranks))(x, Replicate(table), extra=Replicate({"bias": bias}))
    assert torch.equal(got, wanted)
