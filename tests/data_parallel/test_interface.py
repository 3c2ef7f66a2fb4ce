"""Signatures and attributes are torch's, methods may be overridden, and the functional form does the same."""

import inspect
import pickle
import subprocess
import sys
from unittest import mock

import pytest
import torch
from fakes.nets import Spy, cpu, mlp
from fakes.tensors import numbers
from fakes.wrapper import Lambda
from torch import nn

import mgpu_core
from mgpu_core import DataParallel, data_parallel

SIGNATURES = {
    "DataParallel": (
        "(module, device_ids=None, output_device=None, dim=0, *, shares=None, rng='auto', workers='threads')"
    ),
    "data_parallel": (
        "(module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None, *, shares=None, "
        "rng='auto', workers='threads')"
    ),
    "scatter": "(inputs, target_gpus, dim=0, *, shares=None)",
    "scatter_kwargs": "(inputs, kwargs, target_gpus, dim=0, *, shares=None)",
    "gather": "(outputs, target_device, dim=0)",
    "replicate": "(network, devices, detach=False)",
    "parallel_apply": "(modules, inputs, kwargs_tup=None, devices=None, *, rng='auto', workers='threads')",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_has_torchs_keyword_names(name):
    signature = inspect.signature(getattr(mgpu_core, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    assert text == SIGNATURES[name]
    torchs = inspect.signature(
        getattr(torch.nn.parallel, name, None) or getattr(torch.nn.parallel.scatter_gather, name)
    )
    positional = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in torchs.parameters.values()]


@pytest.mark.parametrize("name", ["scatter", "replicate", "parallel_apply", "gather", "forward"])
def test_methods_have_torchs_parameter_names(name):
    ours = inspect.signature(getattr(DataParallel, name)).parameters
    torchs = inspect.signature(getattr(nn.DataParallel, name)).parameters
    assert list(ours) == list(torchs)


def test_is_a_torch_data_parallel_that_never_ran_its_constructor(monkeypatch):
    monkeypatch.setattr(nn.DataParallel, "__init__", lambda *args, **kwargs: pytest.fail("torch's constructor ran"))
    wrapper = DataParallel(mlp(), cpu(2))
    assert isinstance(wrapper, nn.DataParallel)
    assert wrapper(torch.ones(4, 4)).shape == (4, 3)


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
def test_attributes_are_torchs():
    net = mlp()
    wrapper = DataParallel(net, cpu(3), dim=1)
    assert wrapper.module is net
    assert wrapper.dim == 1
    assert wrapper.device_ids == [torch.device("cpu")] * 3
    assert wrapper.output_device == wrapper.src_device_obj == torch.device("cpu")


@pytest.mark.parametrize("make", [list, tuple, iter])
def test_device_ids_may_be_any_sequence(make):
    assert len(DataParallel(mlp(), make(["cpu", torch.device("cpu"), "cpu"])).device_ids) == 3


@pytest.mark.parametrize("devices", ["cpu", "cuda", 0, torch.device("cpu")])
@pytest.mark.parametrize("functional", [False, True])
def test_a_bare_device_is_a_type_error_that_asks_for_a_list(devices, functional):
    with pytest.raises(TypeError, match="list"):
        data_parallel(mlp(), torch.ones(2, 4), devices) if functional else DataParallel(mlp(), devices)


@pytest.mark.parametrize("devices", [["cpu", "cuda:77"], ["nothing"], [-2]])
def test_devices_that_do_not_exist(devices):
    with pytest.raises(ValueError, match="device"):
        DataParallel(mlp(), devices)


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
def test_minus_one_is_the_cpu_with_torchs_warning():
    with pytest.warns(FutureWarning, match="Using -1 to represent CPU tensor is deprecated"):
        wrapper = DataParallel(mlp(), [-1, -1])
    assert wrapper(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.parametrize("shares", [[1], [1, 0], [1, -1], [float("nan"), 1], [float("inf"), 1]])
def test_bad_shares_are_refused_by_the_constructor(shares):
    with pytest.raises(ValueError, match="share"):
        DataParallel(mlp(), cpu(2), shares=shares)


class Overridden(DataParallel):
    """As libraries do it: own chunks, own replicas, own outputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.order = []

    def scatter(self, inputs, kwargs, device_ids):
        self.order.append(("scatter", len(device_ids)))
        (x,) = inputs
        return [(x[:1],), (x[1:],)], [dict(kwargs), dict(kwargs)]

    def replicate(self, module, device_ids):
        self.order.append(("replicate", len(device_ids)))
        return super().replicate(module, device_ids)

    def parallel_apply(self, replicas, inputs, kwargs):
        self.order.append(("parallel_apply", len(replicas)))
        return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs, output_device):
        self.order.append(("gather", len(outputs)))
        return outputs


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_overridden_methods_are_used():
    spy = Spy()
    wrapper = Overridden(spy, cpu(3))
    x = torch.arange(7.0).repeat(2, 1).t()
    outputs = wrapper(x)
    assert wrapper.order == [("scatter", 3), ("replicate", 2), ("parallel_apply", 2), ("gather", 2)]
    assert [len(out) for out in outputs] == [1, 6]
    assert [len(note["rows"]) for note in spy.by_rank()] == [1, 6]


class GatherSpy(DataParallel):
    def gather(self, outputs, output_device):
        self.asked = output_device
        return outputs


def test_output_device_is_honoured(ranks):
    wrapper = GatherSpy(mlp(), cpu(ranks))
    wrapper.output_device = torch.device("meta")
    wrapper(numbers(8, 4))
    assert wrapper.asked == torch.device("meta")


@pytest.mark.parametrize("output", ["cpu", torch.device("cpu")])
def test_output_device_may_be_named(output, ranks, recwarn):
    out = DataParallel(mlp(), cpu(ranks), output_device=output)(numbers(8, 4))
    assert out.device.type == "cpu"
    assert data_parallel(mlp(), numbers(8, 4), cpu(ranks), output).device.type == "cpu"
    assert not recwarn.list


@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 5, 8])
def test_data_parallel_runs_once_with_arguments_of_all_kinds(ranks):
    net = Lambda(lambda self, x, y=0, *, flag=1: (self.linear(x) + y) * flag)
    x, y = numbers(8, 2), numbers(8, 2)
    assert torch.equal(data_parallel(net, x, cpu(ranks)), net.linear(x))
    assert torch.equal(data_parallel(net, (x, y), cpu(ranks)), net.linear(x) + y)
    kwargs = {"y": y, "flag": 2}
    out = data_parallel(module=net, inputs=x, device_ids=cpu(ranks), module_kwargs=kwargs)
    assert torch.equal(out, (net.linear(x) + y) * 2)
    assert kwargs == {"y": y, "flag": 2}
    out.sum().backward()
    assert net.linear.bias.grad.tolist() == [16, 16]
    with torch.no_grad():
        assert not data_parallel(net, x, cpu(ranks)).requires_grad


def test_data_parallel_with_dim_and_shares():
    sizes = []
    net = Lambda(lambda self, x: sizes.append(x.size(1)) or x * 2)
    x = numbers(2, 6)
    assert torch.equal(data_parallel(net, x, cpu(2), dim=1, shares=[2, 1]), x * 2)
    assert sorted(sizes) == [2, 4]


def test_the_function_is_not_hidden_by_its_file():
    """The import system names a file in its package once it is read."""
    code = (
        "import mgpu_core; from mgpu_core.data_parallel import data_parallel as own; import mgpu_core.data_parallel; "
        "from mgpu_core import data_parallel; assert mgpu_core.data_parallel is data_parallel is own"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_the_package_is_pickled_by_its_name():
    """As frameworks do that send code to other processes."""
    assert pickle.loads(pickle.dumps(mgpu_core)) is mgpu_core


def test_the_function_can_be_put_in_another_ones_place():
    with mock.patch("mgpu_core.data_parallel", "other"):
        assert mgpu_core.data_parallel == "other"
    assert mgpu_core.data_parallel is data_parallel
