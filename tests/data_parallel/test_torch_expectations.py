"""Expectations of torch's own tests of DataParallel and data_parallel."""

import gc
from collections import OrderedDict
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from fakes.collector import wake_workers
from fakes.nets import whole
from fakes.two_devices import HOME, OTHER, TEAM, linear, rows
from torch import nn

import mgpu_core
from mgpu_core import DataParallel, comm, data_parallel, parallel_apply, replicate


def test_buffers_that_require_grad():
    class Scale(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.register_buffer("factor", factor)
            self.register_buffer("shift", factor.detach().clone())

        def forward(self, x):
            return x * self.factor + self.shift

    factor = torch.ones(4, dtype=torch.float64, device=HOME, requires_grad=True)
    model, x = DataParallel(Scale(factor), TEAM), rows(4, columns=4)
    assert model.module.factor.requires_grad
    model(x).sum().backward()
    assert torch.equal(factor.grad, x.sum(0))


def test_rnn_with_flattened_parameters_with_and_without_gradients():
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4, 1, batch_first=True, bidirectional=True)

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    net = Rnn().to(HOME, torch.float64)
    model = DataParallel(deepcopy(net), TEAM)
    x = torch.ones(4, 5, 3, dtype=torch.float64, device=HOME)
    with torch.no_grad():
        torch.testing.assert_close(model(x), net(x))
    for module in (net, model):
        module(x).square().mean().backward()
        torch.optim.SGD(module.parameters(), lr=10).step()
    for one, other in zip(net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bare", [False, True], ids=["tuples", "bare"])
def test_parallel_apply_takes_tuples_and_bare_tensors(bare):
    modules, inputs = (linear(HOME), linear(OTHER)), (rows(device=HOME), rows(device=OTHER))
    outputs = parallel_apply(modules, inputs if bare else [(x,) for x in inputs], None)
    assert all(torch.equal(out, module(x)) for out, module, x in zip(outputs, modules, inputs, strict=True))


def test_parallel_apply_under_autocast():
    modules = (linear(HOME, torch.float32), linear(OTHER, torch.float32))
    inputs = (rows(device=HOME, dtype=torch.float32), rows(device=OTHER, dtype=torch.float32))
    with torch.autocast(HOME.type, dtype=torch.bfloat16):
        outputs = parallel_apply(modules, inputs, None)
        wanted = [module(x) for module, x in zip(modules, inputs, strict=True)]
    assert all(out.dtype == torch.bfloat16 for out in outputs)
    assert all(torch.equal(out, each) for out, each in zip(outputs, wanted, strict=True))


def test_parallel_apply_passes_the_exception_on():
    class Missing(nn.Module):
        def forward(self, *args):
            return {}["wonderful"]

    with pytest.raises(
        KeyError, match=r"Caught KeyError in replica 0 on device [\s\S]+Original Traceback[\s\S]+wonderful"
    ):
        parallel_apply((Missing(), Missing()), (None, None), devices=[HOME, HOME])


class Several(nn.Module):
    def forward(self, one, two, factor, three=None):
        return factor * (one * two) if three is None else factor * (one * two + three)


@pytest.mark.parametrize("devices", [TEAM, TEAM[::-1], TEAM[:1]], ids=["both", "turned", "one"])
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("functional", [False, True], ids=["module", "function"])
def test_several_inputs_numbers_and_keywords(devices, keyword, functional):
    one, two = rows().requires_grad_(), rows(columns=3).flip(0).requires_grad_()
    kwargs = {"three": rows()} if keyword else {}
    Several()(one, two, 2.0, **kwargs).sum().backward()
    wanted = one.grad.clone(), two.grad.clone()
    one.grad = two.grad = None
    if functional:
        out = data_parallel(Several(), (one, two, 2.0), devices, module_kwargs=kwargs)
    else:
        out = DataParallel(Several(), devices)(one, two, 2.0, **kwargs)
    out.sum().backward()
    assert torch.equal(out, Several()(one, two, 2.0, **kwargs))
    assert torch.equal(one.grad, wanted[0])
    assert torch.equal(two.grad, wanted[1])


@pytest.mark.parametrize("functional", [False, True], ids=["module", "function"])
def test_the_module_must_be_where_the_first_rank_is(functional):
    if HOME == OTHER:
        pytest.skip("all ranks are on one device here: the process of fakes/on_the_fake.py has several")

    def run(module, devices, should_fail):
        def call():
            return data_parallel(module, rows(), devices) if functional else DataParallel(module, devices)(rows())

        if not should_fail:
            return call()
        text = f"module must have its parameters and buffers on device {torch.device(devices[0])}"
        with pytest.raises(RuntimeError, match=text):
            call()
        return None

    run(linear("cpu"), TEAM, True)
    run(linear(OTHER), TEAM, True)
    run(linear(HOME), TEAM[::-1], True)
    run(linear(HOME), TEAM, False)
    run(linear(OTHER), TEAM[::-1], False)
    mixed = nn.Sequential(linear(HOME), nn.Linear(2, 2).to(OTHER, torch.float64))
    run(mixed, TEAM, True)
    run(mixed, TEAM[::-1], True)
    run(mixed.to(HOME), TEAM, False)
    run(mixed, TEAM[::-1], True)
    run(mixed.to(OTHER), TEAM[::-1], False)


def test_no_reference_cycles():
    model, x = DataParallel(linear(), TEAM), rows()
    left = []
    for _ in range(4):  # what threads of other tests have left goes once; a cycle comes again each time
        model(x).sum().backward()
        wake_workers()
        left.append(gc.collect())
    assert min(left[1:]) == 0, left


def test_no_grad_reaches_the_ranks():
    class Asserting(nn.Module):
        def forward(self, x):
            assert not torch.is_grad_enabled()
            return x

    with torch.no_grad():
        assert torch.equal(data_parallel(Asserting(), rows(), TEAM), rows())
    with pytest.raises(AssertionError):
        data_parallel(Asserting(), rows(), TEAM)


@pytest.mark.parametrize("devices", [TEAM, TEAM[::-1]], ids=["both", "turned"])
@pytest.mark.parametrize("make", [linear, lambda device: whole(nn.Embedding(7, 3, sparse=True)).to(device)])
def test_result_and_gradients_live_where_the_first_rank_is(devices, make):
    net = make(OTHER)
    x = rows(device=OTHER) if isinstance(net, nn.Linear) else torch.arange(14, device=OTHER).view(7, 2) % 7
    net(x).sum().backward()
    wanted, gradients = net(x), [p.grad.to_dense() for p in net.parameters()]
    net = make(devices[0])
    out = data_parallel(net, x, devices)  # the input may be anywhere
    out.sum().backward()
    assert out.device == torch.device(devices[0])
    assert torch.equal(out, wanted)
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert parameter.grad.device == torch.device(devices[0])
        assert parameter.grad.is_sparse == isinstance(net, nn.Embedding)
        assert torch.equal(parameter.grad.to_dense(), gradient)


def test_nested_output():
    def nest(x):
        return [x, (x + 1, x * 2, [x - 1]), x, OrderedDict(a=x, b=[x.abs()])]

    class Nest(nn.Module):
        def forward(self, x):
            return nest(x)

    out, wanted = data_parallel(Nest(), rows(), TEAM), nest(rows())
    assert [type(each) for each in out] == [torch.Tensor, tuple, torch.Tensor, OrderedDict]
    assert type(out[1][2]) is type(out[3]["b"]) is list
    assert list(out[3]) == ["a", "b"]
    pairs = [(out[0], wanted[0]), *zip(out[1][:2], wanted[1][:2], strict=True), (out[1][2][0], wanted[1][2][0])]
    pairs += [(out[2], wanted[2]), (out[3]["a"], wanted[3]["a"]), (out[3]["b"][0], wanted[3]["b"][0])]
    assert all(torch.equal(one, other) for one, other in pairs)


def test_nested_input():
    class Second(nn.Module):
        def forward(self, *inputs):
            return inputs[1][0]

    x = rows()
    assert torch.equal(data_parallel(Second(), (x + 1, (x + 2, x), x + 3), TEAM), x + 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["positional", "keyword"])
def test_every_floating_dtype(dtype, way):
    net, x = linear(dtype=dtype), rows(20, dtype=dtype)
    model = DataParallel(net, TEAM)
    out = model(x) if way == "positional" else model(input=x)
    assert out.device == HOME
    assert torch.equal(out, net(x))


@pytest.mark.parametrize("empty", [[], {}, ()], ids=["list", "dict", "tuple"])
def test_empty_containers_in_keywords(empty):
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, input):  # noqa: A002
            assert type(input["unused"]) is type(empty)
            return self.linear(input["data"])

    net, x = Picks(), rows(20)
    assert torch.equal(DataParallel(net, TEAM)(input={"data": x, "unused": empty}), net.linear(x))


def test_device_objects_and_output_device():
    net, x = linear(), rows().requires_grad_()
    assert torch.equal(data_parallel(net, x, device_ids=TEAM, output_device=HOME), net(x))
    assert torch.equal(data_parallel(net, x, device_ids=(HOME, OTHER), output_device=HOME), net(x))
    assert data_parallel(net, x, device_ids=(HOME, OTHER), output_device=OTHER).device == OTHER


def test_gradient_penalty():
    """Double backward through the wrapper, whose first graph is gone by then."""
    net = nn.Linear(4, 1).to(HOME, torch.float64)
    model = DataParallel(net, TEAM)
    x = torch.ones(2, 4, dtype=torch.float64, device=HOME, requires_grad=True)

    def penalty():
        out = model(x)
        return torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)[0].mean()

    penalty().backward()
    assert net.weight.grad.tolist() == [[0.25] * 4]
    # Torch reports a gradient of zero for the bias, which no part of the penalty depends on; one device gives none.
    assert net.bias.grad is None


def test_zero_grad_in_a_replica_warns_that_it_has_no_effect():
    class Zeroes(nn.Module):
        def forward(self, x):
            with pytest.warns(
                UserWarning, match=r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel"
            ):
                self.zero_grad()
            return x

    for twin in replicate(Zeroes(), TEAM):  # one after the other: warnings are caught for the whole process
        twin(rows())


def test_autocast_decorator_on_forward():
    class Half(nn.Linear):
        @torch.autocast(HOME.type, dtype=torch.bfloat16)
        def forward(self, x):
            return super().forward(x)

    assert DataParallel(Half(8, 8).to(HOME), TEAM)(torch.ones(8, 8, device=HOME)).dtype == torch.bfloat16


CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize("formats", [[CONTIGUOUS] * 4, [LAST] * 2 + [CONTIGUOUS] * 2, [LAST] * 4], ids=str)
@pytest.mark.parametrize("dtypes", [[torch.float32] * 4, [torch.float32] * 2 + [torch.bfloat16] * 2], ids=str)
def test_gradients_have_the_layout_of_their_parameters(formats, dtypes):
    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            channels = [4, 6, 8, 6, 4]
            self.convs = nn.ModuleList(
                nn.Conv2d(*pair, 2).to(memory_format=layout, dtype=dtype)
                for pair, layout, dtype in zip(pairwise(channels), formats, dtypes, strict=True)
            )

        def forward(self, x):
            for conv in self.convs:
                x = conv(x.to(conv.weight.dtype))
            return x

    net = Convolutions().to(HOME)
    model = DataParallel(deepcopy(net), TEAM)
    x = torch.randn(8, 4, 8, 8, device=HOME)
    tolerance = 1e-5 if torch.bfloat16 not in dtypes else 5e-2
    for _ in range(2):  # gradients are made in the first round and added to zeros in the second
        for module in (net, model):
            module.zero_grad(set_to_none=False)
            module(x).float().square().mean().backward()
        for conv, ours, layout in zip(net.convs, model.module.convs, formats, strict=True):
            assert ours.weight.grad.is_contiguous(memory_format=layout)
            torch.testing.assert_close(ours.weight.grad, conv.weight.grad, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(ours.bias.grad, conv.bias.grad, rtol=tolerance, atol=tolerance)


def test_all_of_torchs_names_are_there():
    for name in ("DataParallel", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"):
        assert hasattr(torch.nn.parallel, name)
        assert hasattr(mgpu_core, name)
    for name in ("broadcast", "broadcast_coalesced", "gather", "reduce_add", "reduce_add_coalesced", "scatter"):
        assert hasattr(torch.nn.parallel.comm, name)
        assert hasattr(comm, name)
