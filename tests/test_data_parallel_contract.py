"""What the drop-in promises, bullet by bullet: one named test each, on ranks of the CPU."""

import contextvars
import copy
import gc
import inspect
import io
import pickle
import threading
import time
import warnings
import weakref
from collections import UserDict
from contextlib import suppress
from itertools import pairwise
from types import MethodType

import pytest
import torch
from fakes.nets import Cnn, Embedded, Lstm, Polynomial, Spy, Tied, chunks, cpu, in_a_new_thread, mlp, whole
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import mgpu_core
from mgpu_core import DataParallel, Replicate, _core, data_parallel

RANKS = [1, 2, 3, 5, 8]
SEVERAL = [2, 3, 8]


class Lambda(nn.Module):
    """A linear layer around a function of its own: ``function(module, x)``."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.linear = whole(nn.Linear(2, 2))
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def numbers(*shape):
    """Small whole numbers, all rows different."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 11 - 4).float()


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters()}


def equal_gradients(one, other):
    assert one.keys() == other.keys()
    for name in one:
        if one[name] is None or other[name] is None:
            assert one[name] is None, name
            assert other[name] is None, name
        else:
            torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-11, msg=name)


def agree(plain, ranks, *inputs, loss=lambda out: out.pow(2).sum(), dim=0):
    """Output and gradients of the plain module and of a wrapped deep copy; returns the copy."""
    net = copy.deepcopy(plain)
    _core.reset_counters()
    got = DataParallel(net, cpu(ranks), dim=dim)(*inputs)
    used = {rank for operation, _, rank in _core.counters() if operation == "gather"}
    assert len(used) == (ranks if ranks > 1 else 0), "not every rank ran"
    wanted = plain(*inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    loss(got).backward()
    loss(wanted).backward()
    equal_gradients(gradients(net), gradients(plain))
    return net


# Signatures and the class.


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


def test_minus_one_is_the_cpu_with_torchs_warning():
    with pytest.warns(FutureWarning, match="Using -1 to represent CPU tensor is deprecated"):
        wrapper = DataParallel(mlp(), [-1, -1])
    assert wrapper(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.parametrize("shares", [[1], [1, 0], [1, -1], [float("nan"), 1], [float("inf"), 1]])
def test_bad_shares_are_refused_by_the_constructor(shares):
    with pytest.raises(ValueError, match="share"):
        DataParallel(mlp(), cpu(2), shares=shares)


# Checkpoints.


def test_state_dict_keys_carry_module():
    net = Cnn()
    wrapper = DataParallel(net, cpu(2))
    assert list(wrapper.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    assert [name for name, _ in wrapper.named_parameters()] == [f"module.{name}" for name, _ in net.named_parameters()]


def test_checkpoint_goes_to_torchs_data_parallel_and_back():
    ours, theirs = DataParallel(Cnn(), cpu(3)), nn.DataParallel(Cnn())
    ours(torch.ones(6, 1, 4, 4)).sum().backward()
    stream = io.BytesIO()
    torch.save(ours.state_dict(), stream)
    stream.seek(0)
    theirs.load_state_dict(torch.load(stream, weights_only=True), strict=True)
    back = DataParallel(Cnn(), cpu(2))
    back.load_state_dict(theirs.state_dict(), strict=True)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.cpu()), name


# Where the module is.


@pytest.mark.parametrize("ranks", SEVERAL)
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


# Gradients.


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rows", [8, 11])
def test_gradients_are_summed_and_equal_one_devices_exactly(ranks, rows):
    plain = Polynomial()
    net = copy.deepcopy(plain)
    x = numbers(rows, 3)
    DataParallel(net, cpu(ranks))(x).sum().backward()
    plain(x).sum().backward()
    for name, grad in gradients(plain).items():
        assert torch.equal(net.get_parameter(name).grad, grad), name
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("ranks", RANKS)
def test_autograd_grad_reaches_the_wrapped_parameters_and_the_input(ranks):
    net, x = Polynomial(), numbers(8, 3).requires_grad_()
    inputs = [x, *net.parameters()]
    got = torch.autograd.grad(DataParallel(net, cpu(ranks))(x).sum(), inputs)
    for one, other in zip(got, torch.autograd.grad(net(x).sum(), inputs), strict=True):
        assert torch.equal(one, other)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("ranks", RANKS)
def test_double_backward(ranks):
    net, x = Polynomial(), numbers(8, 3).requires_grad_()

    def penalty(forward):
        grads = torch.autograd.grad(forward(x).sum(), [x, *net.parameters()], create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in grads), [x, *net.parameters()], allow_unused=True)

    for one, other in zip(penalty(DataParallel(net, cpu(ranks))), penalty(net), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


class OnePerRow(nn.Module):
    """Each row has one of two layers: a rank may use one alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        whole(self)

    def forward(self, x):
        found = x.new_zeros(x.shape)
        for layer, rows in zip(self.layers, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if rows.any():
                found = found.index_put((rows.nonzero()[:, 0],), layer(x[rows]) ** 2)
        return found


@pytest.mark.parametrize("ranks", RANKS)
def test_double_backward_where_ranks_use_other_parameters(ranks):
    net, x = OnePerRow(), numbers(8, 3).abs() + 1
    x[4:, 0] *= -1

    def penalty(forward):
        grads = torch.autograd.grad(forward(x).sum(), list(net.parameters()), create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in grads), list(net.parameters()))

    for one, other in zip(penalty(DataParallel(net, cpu(ranks))), penalty(net), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_that_are_zero_everywhere(ranks):
    """Torch has tensors without memory for them: from the sign of a parameter, and the curvature of an L1 loss."""
    net, x = Polynomial(), numbers(8, 3).requires_grad_()

    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x) + self.net.first.bias.sgn().sum()

    def penalty(forward):
        found = forward(x)
        loss = nn.functional.l1_loss(found, torch.zeros_like(found), reduction="sum")
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad((grad * grad).sum() + found.sum(), list(net.parameters()))

    signed = Signed()
    for one, other in zip(penalty(DataParallel(signed, cpu(ranks))), penalty(signed), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", RANKS)
def test_hooks_on_parameters_run_once_with_the_sum(ranks):
    plain, net = Polynomial(), Polynomial()
    x = numbers(8, 3)
    plain(x).sum().backward()
    seen, accumulated = [], []
    net.first.weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    net.first.weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert len(seen) == len(accumulated) == 1
    assert torch.equal(seen[0], plain.first.weight.grad)
    assert torch.equal(accumulated[0], 2 * plain.first.weight.grad)
    assert torch.equal(net.first.weight.grad, 2 * plain.first.weight.grad)


@pytest.mark.parametrize("ranks", RANKS)
def test_tied_weights(ranks):
    net = agree(Tied().double(), ranks, torch.arange(16).reshape(8, 2) % 7)
    assert net.out.weight is net.embedding.weight


@pytest.mark.parametrize("ranks", RANKS)
def test_frozen_parameters(ranks):
    net = Polynomial()
    net.first.weight.requires_grad_(False)
    net.last.bias.requires_grad_(False)
    got = agree(net, ranks, numbers(8, 3))
    assert got.first.weight.grad is None
    assert got.first.bias.grad is not None


@pytest.mark.parametrize("ranks", RANKS)
def test_all_parameters_frozen(ranks):
    net = mlp().requires_grad_(False)
    assert not DataParallel(net, cpu(ranks))(numbers(8, 4)).requires_grad
    x = numbers(8, 4).requires_grad_()
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("ranks", RANKS)
def test_unused_parameters_get_no_gradient(ranks):
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    net.forward = MethodType(lambda self, x: self["used"](x), net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.5)
    before = net["unused"].weight.detach().clone()
    DataParallel(net, cpu(ranks))(numbers(8, 2)).sum().backward()
    assert net["unused"].weight.grad is None
    assert net["used"].weight.grad is not None
    optimizer.step()
    assert torch.equal(net["unused"].weight, before)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_parameter_used_on_one_rank_only(ranks):
    net = Lambda(lambda self, x: self.linear(x) if (x == 5).all() else x * 1.0)
    x = torch.zeros(ranks, 2)
    x[-1] = 5
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert net.linear.weight.grad.tolist() == [[5, 5], [5, 5]]
    assert net.linear.bias.grad.tolist() == [1, 1]


@pytest.mark.parametrize("ranks", RANKS)
def test_buffers_that_require_grad(ranks):
    net = Lambda(lambda self, x: self.linear(x) * self.scale)
    net.register_buffer("scale", torch.tensor([2.0, 3.0], requires_grad=True))
    x = numbers(8, 2)
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert torch.equal(net.scale.grad, net.linear(x).sum(0))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([numbers(2, 2), numbers(2, 2) + 1])
        self.named = nn.ParameterDict({"a": numbers(2), "b": numbers(2) - 1})

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        assert len(self.weights) == len(self.named) == 2
        return x * self.named["a"] + sum(self.named.values())


@pytest.mark.parametrize("ranks", RANKS)
def test_parameter_list_and_dict(ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(Lists(), ranks, numbers(8, 2))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_embedding_gradients(ranks, sparse):
    plain = Embedded(sparse)
    net = copy.deepcopy(plain)
    x = torch.tensor([[0, 1], [1, 2], [2, 0], [5, 5], [0, 1], [3, 0], [1, 1], [2, 5]])
    weights = numbers(8, 2, 3)
    (DataParallel(net, cpu(ranks))(x) * weights).sum().backward()
    (plain(x) * weights).sum().backward()
    grad = net.embedding.weight.grad
    assert grad.is_sparse == sparse
    wanted = plain.embedding.weight.grad
    assert torch.equal(grad.to_dense() if sparse else grad, wanted.to_dense() if sparse else wanted)
    torch.optim.SGD(net.parameters(), 1.0).step()


@pytest.mark.parametrize("ranks", RANKS)
def test_complex_parameters(ranks):
    net = nn.Module()
    net.weight = nn.Parameter(torch.complex(numbers(3, 2), numbers(3, 2) + 1))
    net.forward = MethodType(lambda self, x: (x.to(torch.complex64) @ self.weight).abs().pow(2), net)
    x = numbers(8, 3)
    (wanted,) = torch.autograd.grad(net(x).sum(), net.weight)
    DataParallel(net, cpu(ranks))(x).sum().backward()
    assert net.weight.grad.dtype is torch.complex64
    torch.testing.assert_close(net.weight.grad, wanted)


@pytest.mark.parametrize("ranks", RANKS)
def test_channels_last(ranks):
    net = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).double().to(memory_format=torch.channels_last)
    )
    x = torch.randn(8, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    got = agree(net, ranks, x)
    assert got[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert DataParallel(net, cpu(ranks))(x).is_contiguous(memory_format=torch.channels_last)


class Mixed(nn.Module):
    """Two dtypes, two buckets."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.bfloat16)
        whole(self)

    def forward(self, x):
        return self.last(self.first(x).bfloat16()).double()


@pytest.mark.parametrize("ranks", RANKS)
def test_mixed_dtypes(ranks):
    plain = Mixed()
    net = copy.deepcopy(plain)
    x = numbers(8, 3).double() / 4
    DataParallel(net, cpu(ranks))(x).sum().backward()
    plain(x).sum().backward()
    for name, grad in gradients(plain).items():
        assert net.get_parameter(name).grad.dtype is grad.dtype
        torch.testing.assert_close(net.get_parameter(name).grad, grad, rtol=2e-2, atol=2e-2)


def test_last_bucket_is_reduced_before_the_last_modules_backward():
    order = []
    net = Mixed()
    net.first.register_full_backward_hook(lambda *_: order.append("backward of first"))
    net.last.weight.register_hook(lambda _: order.append("reduced last"))
    net.first.weight.register_hook(lambda _: order.append("reduced first"))
    x = numbers(9, 3).double().requires_grad_()

    def step():
        order.clear()
        DataParallel(net, cpu(3))(x).sum().backward()

    for _ in range(3):
        step()
        assert order.count("backward of first") == 3
        in_a_new_thread(step)
        assert order.count("backward of first") == 3
        assert order.index("reduced last") < max(i for i, each in enumerate(order) if each == "backward of first")
        assert order.index("reduced first") > order.index("reduced last")


class Doubling(nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrized():
    net = whole(nn.Linear(3, 2).double())
    parametrize.register_parametrization(net, "weight", Doubling())
    return net


WEIGHTS = {
    "parametrization": parametrized,
    "parametrizations.weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 2).double()),
    "weight_norm": lambda: torch.nn.utils.weight_norm(nn.Linear(3, 2).double()),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 2).double()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_computed_weights(kind, ranks):
    plain, net = WEIGHTS[kind](), WEIGHTS[kind]()
    net.load_state_dict(plain.state_dict())
    x = numbers(8, 3).double()
    plain(x).pow(2).sum().backward()
    out = DataParallel(net, cpu(ranks))(x)
    torch.testing.assert_close(out, plain(x))
    out.pow(2).sum().backward()
    equal_gradients(gradients(net), gradients(plain))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", RANKS)
def test_cached_parametrization(ranks):
    plain, net = parametrized(), parametrized()
    x = numbers(8, 3).double()
    plain(x).sum().backward()
    with parametrize.cached():
        DataParallel(net, cpu(ranks))(x).sum().backward()
    equal_gradients(gradients(net), gradients(plain))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [torch.nn.utils.spectral_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("ranks", RANKS)
def test_spectral_norm_keeps_its_vectors_in_the_wrapped_module(kind, ranks):
    torch.manual_seed(0)
    plain = kind(nn.Linear(4, 3).double())
    torch.manual_seed(0)
    net = kind(nn.Linear(4, 3).double())
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 4).double()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    for _ in range(3):
        torch.testing.assert_close(wrapper(x), plain(x))
    assert before
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(net.get_buffer(name), buffer)
        assert not torch.equal(buffer, before[name])
    wrapper(x).sum().backward()
    plain(x).sum().backward()
    equal_gradients(gradients(net), gradients(plain))


@pytest.mark.parametrize("ranks", RANKS)
def test_lstm(ranks):
    agree(Lstm().double(), ranks, torch.randn(8, 3, 4, dtype=torch.float64))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, mask):
        return self.attention(x, x, x, key_padding_mask=mask)[0]


@pytest.mark.parametrize("ranks", RANKS)
def test_multihead_attention(ranks):
    mask = torch.arange(5).expand(8, 5) > torch.arange(8)[:, None] % 4
    agree(Attention().double(), ranks, torch.randn(8, 5, 4, dtype=torch.float64), mask)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", RANKS)
def test_script_module(ranks):
    plain = mlp().double()
    net = torch.jit.script(copy.deepcopy(plain))
    x = numbers(8, 4).double()
    _core.reset_counters()
    out = DataParallel(net, cpu(ranks))(x)
    torch.testing.assert_close(out, plain(x))
    assert sum(op == "gather" for op, _, _ in _core.counters()) == (ranks if ranks > 1 else 0)
    out.sum().backward()
    plain(x).sum().backward()
    equal_gradients(gradients(net), gradients(plain))


class Own(nn.Linear):
    """As libraries write it: torch's copy, and something of their own."""

    made = 0

    def _replicate_for_data_parallel(self):
        Own.made += 1
        replica = super()._replicate_for_data_parallel()
        replica.factor = 2
        return replica

    def forward(self, x):
        return super().forward(x) * self.factor


@pytest.mark.parametrize("ranks", SEVERAL)
def test_own_replicate_for_data_parallel_is_called(ranks):
    Own.made = 0
    net = whole(Own(2, 2))
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x)
    assert Own.made == ranks
    assert torch.equal(out, 2 * nn.functional.linear(x, net.weight, net.bias))
    assert not hasattr(net, "factor")


# Buffers, and what the next forward sees.


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("grad", [True, False])
def test_rank_0_writes_the_wrapped_modules_buffers(ranks, grad):
    net = Lambda(lambda self, x: self.sum.add_(x[:, 0].sum()) * 0 + x.sum(1))
    net.register_buffer("sum", torch.zeros(1))
    pointer = net.sum.data_ptr()
    x = numbers(9, 2)
    with torch.set_grad_enabled(grad):
        DataParallel(net, cpu(ranks))(x)
    assert net.sum.item() == x[: chunks(9, ranks)[0], 0].sum().item()
    assert net.sum.data_ptr() == pointer


@pytest.mark.parametrize("ranks", RANKS)
def test_buffers_can_be_trained_on_after_a_forward_in_inference_mode(ranks):
    net = Cnn()
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(16, 1, 4, 4)
    with torch.inference_mode():
        wrapper(x)
    assert not any(tensor.is_inference() for tensor in net.state_dict().values())
    wrapper(x).sum().backward()
    assert net.norm.num_batches_tracked.item() == 2


@pytest.mark.parametrize("ranks", RANKS)
def test_next_forward_sees_train_and_eval(ranks):
    net = Lambda(lambda self, x: self.linear(x) * (2 if self.training and self.linear.training else 1))
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 2)
    for mode, factor in ((True, 2), (False, 1), (True, 2)):
        wrapper.train(mode)
        assert torch.equal(wrapper(x), net.linear(x) * factor)


@pytest.mark.parametrize("ranks", RANKS)
def test_next_forward_sees_every_change(ranks):
    net = Lambda(lambda self, x: self.linear(x) * self.factor, factor=2)
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 2)

    def check():
        assert torch.equal(wrapper(x), net(x))
        return wrapper(x).detach().clone()

    outs = [check()]
    net.factor = 3
    outs.append(check())
    net.linear.weight.data.add_(1)
    outs.append(check())
    net.linear.bias.data = torch.tensor([10.0, 20.0])
    outs.append(check())
    with torch.no_grad():
        net.linear.weight.mul_(2)
    outs.append(check())
    net.linear.weight = nn.Parameter(torch.ones(2, 2))
    outs.append(check())
    net.linear = whole(nn.Linear(2, 2, bias=False), seed=3)
    outs.append(check())
    net.function = lambda self, x: self.linear(x) - 1
    outs.append(check())
    net.load_state_dict({"linear.weight": torch.full((2, 2), 5.0)})
    outs.append(check())
    del net.linear
    net.linear = nn.Identity()
    outs.append(check())
    assert all(not torch.equal(one, other) for one, other in pairwise(outs))


@pytest.mark.parametrize("ranks", RANKS)
def test_next_forward_sees_added_and_removed_buffers_and_parameters(ranks):
    net = Lambda(lambda self, x: self.linear(x) + getattr(self, "extra", 0))
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 2)
    base = wrapper(x)
    net.register_buffer("extra", torch.tensor([1.0, 2.0]))
    assert torch.equal(wrapper(x), base + net.extra)
    del net.extra
    net.extra = nn.Parameter(torch.tensor([5.0, 5.0]))
    wrapper(x).sum().backward()
    assert net.extra.grad.tolist() == [8, 8]
    del net.extra
    assert torch.equal(wrapper(x), base)


@pytest.mark.parametrize("ranks", RANKS)
def test_hooks_run_once_per_rank_and_may_be_added_and_removed(ranks):
    net = Polynomial()
    calls = []
    handles = [
        net.first.register_forward_pre_hook(lambda module, args: calls.append("pre")),
        net.first.register_forward_hook(lambda module, args, out: calls.append("forward") or out * 2),
        net.last.register_full_backward_hook(lambda module, into, out: calls.append("backward")),
        net.register_forward_hook(lambda module, args, kwargs, out: calls.append("kwargs"), with_kwargs=True),
    ]
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 3).requires_grad_()
    wrapper(x).sum().backward()
    assert {kind: calls.count(kind) for kind in calls} == dict.fromkeys(("pre", "forward", "backward", "kwargs"), ranks)
    hooked = wrapper(x)
    assert torch.equal(hooked, net(x))
    for handle in handles:
        handle.remove()
    calls.clear()
    out = wrapper(x)
    out.sum().backward()
    assert calls == []
    assert not torch.equal(out, hooked)


@pytest.mark.parametrize("ranks", RANKS)
def test_hooks_on_the_wrapper_run_once(ranks):
    wrapper = DataParallel(mlp(), cpu(ranks))
    rows = []
    wrapper.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    wrapper(numbers(8, 4))
    assert rows == [8]


@pytest.mark.parametrize("ranks", SEVERAL)
def test_attributes_assigned_in_forward_are_lost_with_one_warning(ranks):
    def count(self, x):
        self.count += 1
        return self.linear(x)

    net = Lambda(count, count=0)
    wrapper = DataParallel(net, cpu(ranks))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            wrapper(numbers(8, 2))
    assert net.count == 0
    about = [str(warning.message) for warning in caught if "count" in str(warning.message)]
    assert len(about) == 1, "the contract says: warned once"


@pytest.mark.parametrize("ranks", SEVERAL)
def test_buffers_assigned_anew_in_forward_are_lost_with_one_warning(ranks):
    # The usual mistake: a running mean that is replaced instead of changed in place.
    def average(self, x):
        self.mean = self.mean * 0.5 + x.sum() * 0.5
        return self.linear(x)

    net = Lambda(average)
    net.register_buffer("mean", torch.zeros(()))
    wrapper = DataParallel(net, cpu(ranks))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            wrapper(numbers(8, 2))
    assert net.mean.item() == 0
    assert len([each for each in caught if "mean" in str(each.message)]) == 1


SILENT = {
    "weight_norm": lambda: torch.nn.utils.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
    "parametrization": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "wrapper": lambda: nn.Sequential(DataParallel(nn.Linear(4, 4), cpu(2))),
    "script": lambda: torch.jit.script(nn.Linear(4, 4)),
    "temporary": lambda: Lambda(temporary),
}


def temporary(self, x):
    self.kept = x
    del self.kept
    return x


@pytest.mark.parametrize("kind", SILENT)
def test_nothing_is_warned_of_where_nothing_is_lost(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = SILENT[kind]()
    wrapper = DataParallel(net, cpu(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            wrapper(numbers(8, 4))
    assert [str(each.message) for each in caught if "lost" in str(each.message)] == []


# Earlier graphs and fresh memory.


@pytest.mark.parametrize("ranks", RANKS)
def test_earlier_graph_that_needs_no_parameter_stays_valid(ranks):
    plain = whole(nn.Linear(2, 2))
    net = copy.deepcopy(plain)

    def play(forward, module):
        optimizer = torch.optim.SGD(module.parameters(), 1.0)
        x = numbers(8, 2)
        first = forward(x)
        forward(x + 1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        forward(x + 2)
        (first * numbers(8, 2)).sum().backward()
        return [module.weight.grad.tolist(), module.bias.grad.tolist(), module.weight.tolist()]

    assert play(DataParallel(net, cpu(ranks)), net) == play(plain, plain)


@pytest.mark.parametrize("ranks", RANKS)
def test_earlier_graph_that_saved_a_stepped_parameter_raises_as_on_one_device(ranks):
    net = mlp()
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 4)
    first = wrapper(x)
    wrapper(x).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


LAYOUTS = {
    "dense": lambda: torch.tensor([2.0, 3.0]),
    "expanded": lambda: torch.tensor([2.0]).expand(2),
    "every other": lambda: torch.tensor([2.0, 0.0, 3.0, 0.0])[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_earlier_graph_that_saved_a_buffer_survives_other_forwards(ranks, layout):
    net = Lambda(lambda self, x: self.linear(x) * self.scale)
    net.register_buffer("scale", LAYOUTS[layout]())
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 2)
    first, second = wrapper(x), wrapper(x)
    with torch.no_grad():
        wrapper(x)
    (first + second).sum().backward()
    assert torch.equal(net.linear.bias.grad, 16 * net.scale)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_parameters_of_the_other_ranks_are_fresh_in_every_forward(ranks):
    spy = Spy()
    wrapper = DataParallel(spy, cpu(ranks))
    x = numbers(8, 2).requires_grad_()
    kept = [wrapper(x) for _ in range(4)]
    weights = [note["weight"] for note in spy.seen]
    assert len(set(weights)) == 4 * (ranks - 1) + 1
    assert weights.count(spy.linear.weight.data_ptr()) == 4
    del kept


@pytest.mark.parametrize("ranks", SEVERAL)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_module_that_writes_to_its_input_leaves_the_callers_tensor_alone(ranks, rows):
    net = Lambda(lambda self, x, scale, table: self.linear(x.add_(1)) * scale.mul_(2) + table.add_(1))
    x, scale, table = numbers(rows, 2), torch.tensor(3.0), numbers(2)
    kept = [x.clone(), scale.clone(), table.clone()]
    out = DataParallel(net, cpu(ranks))(x, scale, Replicate(table))
    assert torch.equal(out, net.linear(kept[0] + 1) * 6 + kept[2] + 1)
    for tensor, before in zip((x, scale, table), kept, strict=True):
        assert torch.equal(tensor, before)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_inplace_first_layer(ranks):
    net = nn.Sequential(nn.ReLU(inplace=True), whole(nn.Linear(2, 2)), nn.ReLU(inplace=True))
    x = numbers(8, 2).requires_grad_()
    DataParallel(net, cpu(ranks))(x).sum().backward()
    (wanted,) = torch.autograd.grad(nn.functional.relu(net[1](torch.relu(x))).sum(), x)
    assert torch.equal(x.grad, wanted)
    assert x.min() < 0


@pytest.mark.parametrize("ranks", SEVERAL)
def test_gathered_outputs_are_fresh(ranks):
    net = Lambda(lambda self, x: self.linear(x) * 0 + 1)
    wrapper = DataParallel(net, cpu(ranks))
    one, two = wrapper(numbers(8, 2)), wrapper(numbers(8, 2))
    with torch.no_grad():
        one.fill_(7)
    assert two.tolist() == [[1, 1]] * 8


# Failures.


@pytest.mark.parametrize("ranks", SEVERAL)
def test_failure_in_a_replica_has_type_text_cause_and_notes(ranks):
    def fail(self, x):
        if x[0, 0] > 0:
            raise KeyError("the key")
        return self.linear(x)

    x = torch.ones(ranks, 2)
    x[0] = 0
    with pytest.raises(KeyError) as caught:
        DataParallel(Lambda(fail), cpu(ranks))(x)
    text = str(caught.value)
    assert text.startswith("Caught KeyError in replica 1 on device cpu.\nOriginal Traceback (most recent call last):\n")
    assert "KeyError: 'the key'" in text
    assert caught.value.__cause__.args == ("the key",)
    notes = [f"also in replica {rank} on device cpu: KeyError('the key')" for rank in range(2, ranks)]
    assert getattr(caught.value, "__notes__", []) == notes


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_through(ranks, kind):
    original = kind("stop")

    def stop(self, x):
        raise original

    wrapper = DataParallel(Lambda(stop), cpu(ranks))
    with pytest.raises(kind) as caught:
        wrapper(torch.ones(8, 2))
    assert caught.value is original
    wrapper.module.function = lambda self, x: self.linear(x)
    assert wrapper(torch.ones(8, 2)).shape == (8, 2)


@pytest.mark.parametrize("ranks", RANKS)
def test_failure_in_backward_leaves_everything_usable(ranks):
    net = mlp().double()
    wrapper = DataParallel(net, cpu(ranks))
    handle = net[2].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrapper(numbers(8, 4).double()).sum().backward()
    handle.remove()
    net.zero_grad()
    agree(net, ranks, numbers(8, 4).double())


@pytest.mark.parametrize("ranks", SEVERAL)
def test_handled_failure_frees_the_memory_of_the_forward_at_once(ranks):
    kept = []

    def fail(self, x):
        activation = self.linear(x)
        kept.extend([weakref.ref(activation), weakref.ref(self.linear.weight)])
        raise torch.OutOfMemoryError("as a GPU would")

    wrapper = DataParallel(Lambda(fail), cpu(ranks))
    gc.collect()
    gc.disable()
    try:
        with suppress(torch.OutOfMemoryError):
            wrapper(torch.ones(8, 2))
        assert [ref() for ref in kept] == [None] * (2 * ranks)
    finally:
        gc.enable()


# Memory.


def live_tensors():
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("make", [mlp, Lstm, Cnn])
def test_no_reference_cycles_after_forward_and_backward(ranks, make):
    net = make()
    x = {mlp: numbers(16, 4), Lstm: numbers(16, 3, 4), Cnn: numbers(16, 1, 4, 4)}[make]
    wrapper = DataParallel(net, cpu(ranks))

    def step():
        wrapper(x).sum().backward()
        with torch.no_grad():
            wrapper(x)

    step()
    gc.collect()
    gc.disable()
    try:
        tensors = live_tensors()
        for _ in range(3):
            step()
        assert live_tensors() == tensors
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("ranks", SEVERAL)
def test_replicas_end_with_the_graph(ranks):
    kept = []

    def note(self, x):
        kept.append(weakref.ref(self))
        return self.linear(x)

    wrapper = DataParallel(Lambda(note), cpu(ranks))
    gc.disable()
    try:
        out = wrapper(torch.ones(8, 2))
        assert [ref() for ref in kept] == [None] * ranks
        del out
    finally:
        gc.enable()


def test_a_method_in_an_attribute_works_for_as_long_as_its_replica_lives():
    kept = []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.run = self.double

        def double(self, x):
            return 2 * x

        def forward(self, x):
            kept.append(self)
            return self.run(x)

    DataParallel(Keeps(), cpu(2))(torch.ones(4, 1))
    methods = [each.run for each in kept]
    assert [run(3) for run in methods] == [6, 6]
    kept.clear()
    for run in methods:
        with pytest.raises(ReferenceError, match="the replica of this method is gone"):
            run(3)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_memory_of_a_module_that_keeps_its_own_method_is_freed_at_once(ranks):
    # The module is a cycle itself; but its twins are made anew, with all parameters, in every forward.
    kept = []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.run = self.own

        def own(self, x):
            kept.append(weakref.ref(self.linear.weight))
            return self.linear(x)

        def forward(self, x):
            return self.run(x)

    wrapper = DataParallel(Keeps(), cpu(ranks))
    gc.collect()
    gc.disable()
    try:
        wrapper(torch.ones(8, 2)).sum().backward()
        assert [ref() for ref in kept] == [None] * ranks
    finally:
        gc.enable()


def test_replicas_can_be_saved():
    net = Cnn()
    wrapper = DataParallel(net, cpu(3))
    stream = io.BytesIO()
    torch.save([*wrapper.replicate(net, wrapper.device_ids), wrapper], stream)
    stream.seek(0)
    *replicas, loaded = torch.load(stream, weights_only=False)
    assert len(replicas) == 3
    assert torch.equal(replicas[2].conv.weight, net.conv.weight)
    assert torch.equal(loaded.module.conv.weight, net.conv.weight)


COPIES = {
    "pickle": lambda wrapper: pickle.loads(pickle.dumps(wrapper)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("ranks", [0, *RANKS])
def test_wrapper_pickles_and_copies_also_after_a_forward(ranks, way):
    wrapper = DataParallel(mlp(), cpu(ranks), dim=0, shares=[1] * ranks if ranks else None)
    x = numbers(8, 4)
    wrapper(x).sum().backward()
    other = COPIES[way](wrapper)
    assert type(other) is DataParallel
    assert (other.module is wrapper.module) == (way == "copy")
    for name in ("device_ids", "output_device", "dim", "shares"):
        assert getattr(other, name) == getattr(wrapper, name)
    assert torch.equal(other(x), wrapper(x))


# Odd inputs.


@pytest.mark.parametrize("grad", [True, False])
def test_one_device_runs_the_module_itself_in_this_thread(grad):
    spy = Spy()
    wrapper = DataParallel(spy, ["cpu"])
    _core.reset_counters()
    x = numbers(6, 2)
    with torch.set_grad_enabled(grad):
        wrapper(x)
    (note,) = spy.seen
    assert (note["thread"], note["x"], note["weight"]) == (
        threading.get_ident(),
        x.data_ptr(),
        spy.linear.weight.data_ptr(),
    )
    assert _core.counters() == {}


@pytest.mark.parametrize("ranks", RANKS)
def test_one_devices_failure_is_not_dressed_up(ranks):
    wrapper = DataParallel(Lambda(lambda self: {}["x"]), cpu(ranks))
    with pytest.raises(KeyError) as caught:
        wrapper()
    assert ("Caught KeyError in replica 0" in str(caught.value)) == (ranks > 1)


@pytest.mark.parametrize("ranks", [0, *RANKS])
def test_no_inputs_run_once_on_the_first_rank(ranks):
    calls = []
    net = Lambda(lambda self: calls.append(1) or self.linear.weight * 2)
    assert torch.equal(DataParallel(net, cpu(ranks))(), net.linear.weight * 2)
    assert calls == [1]
    assert torch.equal(data_parallel(net, None, cpu(ranks)), net.linear.weight * 2)
    assert torch.equal(data_parallel(net, (), cpu(ranks), module_kwargs={}), net.linear.weight * 2)


@pytest.mark.parametrize("ranks", RANKS)
def test_zero_rows_run_once_on_rank_0(ranks):
    spy = Spy()
    out = DataParallel(spy, cpu(ranks))(torch.ones(0, 2))
    assert out.shape == (0, 2)
    assert [(len(note["rows"]), note["weight"]) for note in spy.seen] == [(0, spy.linear.weight.data_ptr())]
    out.sum().backward()
    assert spy.linear.weight.grad.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rows", [1, 2])
def test_fewer_rows_than_ranks_with_keyword_flags(ranks, rows):
    flags = []
    net = Lambda(lambda self, x, *, flag, y: flags.append(flag) or self.linear(x) + y)
    x, y = numbers(rows, 2), numbers(rows, 2)
    out = DataParallel(net, cpu(ranks))(x, flag="on", y=y)
    assert flags == ["on"] * min(ranks, rows)
    assert torch.equal(out, net.linear(x) + y)


@pytest.mark.parametrize("ranks", RANKS)
def test_keywords_only(ranks):
    net = Lambda(lambda self, x, inputs, module: self.linear(x) + inputs + module)
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x=x, inputs=x, module=3)
    assert torch.equal(out, net.linear(x) + x + 3)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_different_numbers_of_rows_are_refused_before_anything_runs(ranks):
    spy = Spy()
    _core.reset_counters()
    with pytest.raises(ValueError, match="differ in their number of rows") as caught:
        DataParallel(spy, cpu(ranks))(torch.ones(8, 2), y=[torch.ones(6)])
    assert "inputs[0] has shape (8, 2)" in str(caught.value)
    assert "kwargs['y'][0] has shape (6,)" in str(caught.value)
    assert spy.seen == []
    assert _core.counters() == {}


@pytest.mark.parametrize("ranks", SEVERAL)
def test_lazy_modules_are_refused(ranks):
    net = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    _core.reset_counters()
    with pytest.raises(ValueError, match="Run a dummy forward pass"):
        DataParallel(net, cpu(ranks))(numbers(8, 4))
    assert _core.counters() == {}, "the contract says: raises before anything is copied"
    net(numbers(8, 4))
    assert DataParallel(net, cpu(ranks))(numbers(8, 4)).shape == (8, 2)


@pytest.mark.parametrize("ranks", [0, 1])
def test_one_device_initialises_lazy_modules_as_in_torch(ranks):
    net = nn.LazyLinear(2)
    out = DataParallel(net, cpu(ranks))(numbers(8, 4))
    assert torch.equal(out, net(numbers(8, 4)))


@pytest.mark.parametrize("ranks", RANKS)
def test_module_without_parameters(ranks):
    x = numbers(8, 2)
    assert torch.equal(DataParallel(nn.ReLU(), cpu(ranks))(x), torch.relu(x))


@pytest.mark.parametrize("ranks", RANKS)
def test_outputs_of_every_structure(ranks):
    net = Lambda(lambda self, x: {"y": self.linear(x), "rest": [None, (x[:, 0], "text", 3)], "max": x.max(1)})
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x)
    assert torch.equal(out["y"], net.linear(x))
    assert out["rest"][0] is None
    assert torch.equal(out["rest"][1][0], x[:, 0])
    assert out["rest"][1][1:] == ("text", 3)
    assert torch.equal(out["max"].indices, x.max(1).indices)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_scalar_losses_become_a_vector(ranks):
    net = Lambda(lambda self, x: self.linear(x).sum())
    x = numbers(8, 2)
    with pytest.warns(UserWarning, match="will instead unsqueeze and return a vector"):
        losses = DataParallel(net, cpu(ranks))(x)
    assert losses.tolist() == [net(part).item() for part in x.split(chunks(8, ranks))]
    losses.sum().backward()
    assert net.linear.bias.grad.tolist() == [8, 8]


# Overriding, output_device, the functional form.


class Overridden(DataParallel):
    """As libraries do it: own chunks, own twins, own outputs."""

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_output_device_is_honoured(ranks):
    wrapper = GatherSpy(mlp(), cpu(ranks))
    wrapper.output_device = torch.device("meta")
    wrapper(numbers(8, 4))
    assert wrapper.asked == torch.device("meta")


@pytest.mark.parametrize("output", ["cpu", torch.device("cpu")])
@pytest.mark.parametrize("ranks", RANKS)
def test_output_device_may_be_named(output, ranks, recwarn):
    out = DataParallel(mlp(), cpu(ranks), output_device=output)(numbers(8, 4))
    assert out.device.type == "cpu"
    assert data_parallel(mlp(), numbers(8, 4), cpu(ranks), output).device.type == "cpu"
    assert not recwarn.list


@pytest.mark.parametrize("ranks", [0, *RANKS])
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


# Modules that hold themselves, wrappers in wrappers, threads, checkpoints.


class Holder(nn.Module):
    """Keeps bound methods of its own and of its child, and its forward replaced on the instance."""

    def __init__(self):
        super().__init__()
        self.inner = whole(nn.Linear(2, 2))
        self.step = self.own
        self.table = {"none": None}
        self.forward = MethodType(Holder.other, self)

    def own(self, x):
        return self.inner(x) * 3

    def other(self, x):
        return self.step(x) + self.inner.weight.sum()


@pytest.mark.parametrize("ranks", SEVERAL)
def test_bound_methods_in_attributes_run_on_the_twins_weights(ranks):
    net = Holder()
    pointers = []
    net.inner.register_forward_pre_hook(lambda module, args: pointers.append(module.weight.data_ptr()))
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x)
    assert len(set(pointers)) == ranks
    wanted = Holder()
    assert torch.equal(out, wanted(x))


@pytest.mark.parametrize("inner", [1, 2, 3])
@pytest.mark.parametrize("outer", [1, 2, 3])
def test_data_parallel_inside_data_parallel(outer, inner):
    plain = Polynomial()
    net = copy.deepcopy(plain)
    threads = []
    net.register_forward_hook(lambda *_: threads.append(threading.get_ident()))
    wrapper = DataParallel(nn.Sequential(DataParallel(net, cpu(inner)), nn.ReLU()), cpu(outer))
    x = numbers(9, 3)
    for _ in range(2):
        threads.clear()
        out = wrapper(x)
        assert torch.equal(out, torch.relu(plain(x)))
        assert len(threads) == inner * outer
    out.sum().backward()
    torch.relu(plain(x)).sum().backward()
    for name, grad in gradients(plain).items():
        assert torch.equal(net.get_parameter(name).grad, grad), name


@pytest.mark.parametrize("ranks", RANKS)
def test_one_wrapper_from_eight_threads(ranks):
    net = Polynomial()
    wrapper = DataParallel(net, cpu(ranks))
    barrier = threading.Barrier(8, timeout=20)
    found = {}

    def work(number):
        x = numbers(8, 3) + number
        barrier.wait()
        out = wrapper(x)
        found[number] = (out.detach(), torch.autograd.grad(out.sum(), list(net.parameters())))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert sorted(found) == list(range(8))
    for number, (out, grads) in found.items():
        wanted = net(numbers(8, 3) + number)
        assert torch.equal(out, wanted)
        for one, other in zip(grads, torch.autograd.grad(wanted.sum(), list(net.parameters())), strict=True):
            assert torch.equal(one, other)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant, self.runs = mlp().double(), reentrant, []

    def forward(self, x):
        self.runs.append(len(x))
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoint_inside(ranks, reentrant):
    net = Checkpointed(reentrant)
    calls = []
    net.inner[0].register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    plain = copy.deepcopy(net.inner)
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    out = DataParallel(net, cpu(ranks))(x)
    assert len(calls) == ranks
    out.pow(2).sum().backward()
    assert sorted(calls) == sorted(2 * chunks(8, ranks))  # each rank ran again in backward
    y = x.detach().clone().requires_grad_()
    plain(y).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    equal_gradients(gradients(net.inner), gradients(plain))


class CheckpointedMethod(nn.Module):
    """Runs a method that it keeps in an attribute again in backward, when the forward's twins are gone."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant, self.run = Polynomial(), reentrant, self.own

    def own(self, x):
        return self.inner(x)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoint_of_a_bound_method_in_an_attribute(ranks, reentrant):
    net, plain = CheckpointedMethod(reentrant), Polynomial()
    x = numbers(8, 3)
    DataParallel(net, cpu(ranks))(x.clone().requires_grad_()).sum().backward()
    plain(x).sum().backward()
    equal_gradients(gradients(net.inner), gradients(plain))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoint_outside(ranks, reentrant):
    plain = mlp().double()
    net = copy.deepcopy(plain)
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    checkpoint(DataParallel(net, cpu(ranks)), x, use_reentrant=reentrant).pow(2).sum().backward()
    plain(y).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    equal_gradients(gradients(net), gradients(plain))


@pytest.mark.parametrize("ranks", RANKS)
def test_forward_and_backward_inside_a_backward_hook(ranks):
    net = Polynomial()
    wrapper = DataParallel(net, cpu(ranks))
    inner = []
    x = numbers(8, 3)

    def again(grad):
        if not inner:
            with torch.enable_grad():
                out = wrapper(x)
                inner.append((out.detach(), torch.autograd.grad(out.sum(), net.last.bias)[0]))

    net.first.weight.register_hook(again)
    wrapper(x).sum().backward()
    assert torch.equal(inner[0][0], net(x))
    assert inner[0][1].tolist() == [8, 8]


@pytest.mark.parametrize("ranks", SEVERAL)
def test_backward_inside_the_forward_of_every_rank(ranks):
    def inner(self, x):
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(self.linear(x).pow(2).sum(), self.linear.weight)
        return grad.sum().expand(len(x)).clone()

    net = Lambda(inner)
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x)
    assert torch.equal(out, torch.cat([net(part) for part in x.split(chunks(8, ranks))]))


# What the callers' thread has set.

variable = contextvars.ContextVar("variable", default=None)


@pytest.mark.parametrize("ranks", RANKS)
def test_grad_mode_inference_mode_and_contextvars_reach_the_ranks(ranks):
    seen = []

    def note(self, x):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), variable.get()))
        return self.linear(x)

    wrapper = DataParallel(Lambda(note), cpu(ranks))
    token = variable.set("mine")
    try:
        for mode, wanted in (
            (torch.enable_grad(), (True, False, "mine")),
            (torch.no_grad(), (False, False, "mine")),
            (torch.inference_mode(), (False, True, "mine")),
        ):
            seen.clear()
            with mode:
                out = wrapper(numbers(8, 2))
            assert seen == [wanted] * ranks
            assert out.requires_grad == wanted[0]
            assert out.is_inference() == wanted[1]
    finally:
        variable.reset(token)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", RANKS)
def test_autocast_reaches_the_ranks(ranks, dtype):
    net = whole(nn.Linear(3, 2))
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 3)
    with torch.autocast("cpu", dtype=dtype):
        out = wrapper(x)
        assert out.dtype is dtype
        assert torch.equal(out, net(x))
    out.sum().backward()
    assert net.weight.grad.dtype is torch.float32
    assert torch.equal(net.weight.grad, x.sum(0).expand(2, 3))
    assert wrapper(x).dtype is torch.float32


@pytest.mark.parametrize("ranks", RANKS)
def test_close_and_go_on(ranks):
    spy = Spy()
    wrapper = DataParallel(spy, cpu(ranks))
    x = torch.arange(8.0).repeat(2, 1).t()
    one = wrapper(x)
    wrapper.close()
    wrapper.close()
    assert torch.equal(wrapper(x), one)


class Capturing(nn.Module):
    """Takes an activation the usual way: a hook for the length of the call."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        whole(self)

    def forward(self, x):
        taken = []
        handles = [
            self.inner.register_forward_hook(lambda module, args, out: taken.append(out)),
            self.inner.register_forward_pre_hook(lambda module, args, kwargs: taken.append(args[0]), with_kwargs=True),
        ]
        time.sleep(0.01)  # every rank's hooks are there before any rank computes
        self.inner(x)
        for handle in handles:
            handle.remove()
        taken_in, out = taken
        return taken_in, out


@pytest.mark.parametrize("ranks", SEVERAL)
def test_a_hook_that_a_forward_registers_is_that_ranks_alone(ranks):
    net = Capturing()
    x = numbers(3 * ranks + 1, 2)
    for _ in range(3):
        taken_in, out = DataParallel(net, cpu(ranks))(x)
        assert torch.equal(taken_in, x)
        assert torch.equal(out, net.inner(x))


@pytest.mark.parametrize("ranks", SEVERAL)
def test_a_hook_that_a_forward_leaves_behind_does_not_reach_the_module(ranks):
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            self.inner.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
            self.inner.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
            self.inner.register_full_backward_hook(lambda *_: None)
            self.inner.register_full_backward_pre_hook(lambda *_: None)
            return self.inner(x)

    net = Leaving()
    for _ in range(3):
        DataParallel(net, cpu(ranks))(numbers(2 * ranks, 2)).sum().backward()
    assert not any(value for name, value in vars(net.inner).items() if name.endswith(("_hooks", "_kwargs", "_called")))


@pytest.mark.parametrize("ranks", [1, *SEVERAL])
def test_containers_without_tensors_are_handed_on_as_they_are(ranks):
    class Logging(nn.Module):
        def forward(self, x, log, environment, *, seen):
            log["rows"] = log.get("rows", 0) + len(x)
            seen.append(environment["HOME"])
            return x

    log, seen = {}, []
    DataParallel(Logging(), cpu(ranks))(numbers(2 * ranks, 2), log, Environment(HOME="here", other=1), seen=seen)
    assert log == {"rows": 2 * ranks}
    assert seen == ["here"] * ranks


class Environment(UserDict):
    """Cannot be made from pairs."""

    def __init__(self, *, HOME, other):  # noqa: N803
        super().__init__({"HOME": HOME, "other": other})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", SEVERAL)
def test_frozen_scripts(ranks):
    net = torch.jit.freeze(torch.jit.script(whole(nn.Linear(2, 2)).eval()))
    x = numbers(2 * ranks, 2)
    assert torch.equal(DataParallel(net, cpu(ranks))(x), net(x))


def test_batched_gradients_are_refused_by_name():
    model, x = DataParallel(nn.Linear(2, 2), cpu(2)), numbers(4, 2).requires_grad_()
    out = model(x)
    with pytest.raises(TypeError, match="inside a torch"):
        torch.autograd.grad(out, x, torch.ones(3, 4, 2), is_grads_batched=True)


def test_the_ranks_follow_device_ids():
    """People change the attribute: in place or by another list."""
    model = DataParallel(nn.Linear(2, 1), cpu(2))
    seen = []
    model.module.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    model(torch.ones(6, 2))
    model.device_ids.append(model.device_ids[0])
    model(torch.ones(6, 2))
    model.device_ids = cpu(1)
    model(torch.ones(6, 2))
    assert seen == [3, 3, 2, 2, 2, 6]


def test_a_copy_of_the_wrapper_finds_its_own_team():
    model = DataParallel(nn.Linear(2, 1), cpu(3))
    model(torch.ones(6, 2))
    state = pickle.dumps(model)
    assert b"Team" not in state
    for other in (pickle.loads(state), copy.deepcopy(model)):
        assert torch.equal(other(torch.ones(6, 2)), model(torch.ones(6, 2)))
