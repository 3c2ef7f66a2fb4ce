"""A replica has its parameters: what a forward does with them gives the result of one device."""

import copy
import warnings

import pytest
import torch
from fakes.nets import Scaled, cpu
from torch import nn
from torch.func import functional_call

from mgpu_core import DataParallel, Replicate, replicate


class Forward(nn.Module):
    """Layers, and a function of them and of the inputs."""

    def __init__(self, function, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


def layers(*names):
    torch.manual_seed(0)
    return {name: nn.Linear(4, 4).double() for name in names}


def momentum(net, x):
    with torch.no_grad():
        for one, other in zip(net.a.parameters(), net.b.parameters(), strict=True):
            other.data.mul_(0.9).add_(one.data, alpha=0.1)
    return net.a(x) + net.b(x).detach()


def penalty(net, x):
    return net.a(x) + sum(each.pow(2).sum() for each in net.parameters())


def inner_loop(net, x, support):
    fast = dict(net.a.named_parameters())
    for _ in range(2):
        loss = functional_call(net.a, fast, (support,)).pow(2).mean()
        grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: each - 0.5 * grad for (name, each), grad in zip(fast.items(), grads, strict=True)}
    return functional_call(net.a, fast, (x,))


def doubled(net, x):
    return functional_call(net.a, {name: each * 2 for name, each in net.a.named_parameters()}, (x,))


def by_state(net, x):
    state = net.state_dict(keep_vars=True)
    return x @ state["a.weight"].T + net.get_parameter("a.bias")


def by_first(net, x):
    first = next(net.parameters())
    assert first.dtype is torch.float64
    assert isinstance(first, nn.Parameter)
    return net.a(x.to(first.device)) * sum(each.requires_grad for each in net.parameters())


def deleted(net, x):
    weight = net.a.weight
    del net.a.weight
    assert not hasattr(net.a, "weight")
    net.a.weight = weight * 2
    return net.a(x)


def other_table(net, x):
    net.a._parameters["weight"] = net.a.weight * 2
    return net.a(x)


def fast_weights(net, x):
    for name, each in list(net.a.named_parameters()):
        delattr(net.a, name)
        setattr(net.a, name, each * 3)
    return net.a(x)


def frozen(net, x):
    for each in net.a.parameters():
        each.requires_grad = False
    return net.b(net.a(x))


def frozen_layer(net, x):
    net.a.requires_grad_(False)
    return net.b(net.a(x))


def still_required(net, x):
    for each in net.parameters():
        each.requires_grad = True
    return net.b(net.a(x))


def frozen_meanwhile(net, x):
    """As a GAN in one forward: the generator's part with a frozen discriminator, then the discriminator's part."""
    fake = net.a(x)
    net.b.requires_grad_(False)
    of_generator = net.b(fake)
    net.b.requires_grad_(True)
    assert all(each.requires_grad for each in net.b.parameters())
    return of_generator - net.b(fake.detach()).tanh()


def frozen_first(net, x):
    net.b.requires_grad_(False)
    held = net.b(x)
    net.b.requires_grad_(True)
    return net.a(held)


def copied(net, x):
    return net.a(x) + copy.deepcopy(net.a)(x).detach()


def gradient_inside(net, x):
    parameters = [each for each in net.a.parameters() if each.requires_grad]
    grads = torch.autograd.grad(net.a(torch.ones_like(x[:1])).pow(2).sum(), parameters, create_graph=True)
    return net.b(net.a(x)) + grads[1]


FORWARDS = {
    "momentum": (momentum, ("a", "b")),
    "penalty": (penalty, ("a", "b")),
    "functional_call": (doubled, ("a",)),
    "state_dict": (by_state, ("a",)),
    "the first parameter": (by_first, ("a", "b")),
    "a deleted parameter": (deleted, ("a",)),
    "a written table": (other_table, ("a",)),
    "fast weights": (fast_weights, ("a",)),
    "frozen one by one": (frozen, ("a", "b")),
    "a frozen layer": (frozen_layer, ("a", "b")),
    "nothing frozen": (still_required, ("a", "b")),
    "frozen meanwhile": (frozen_meanwhile, ("a", "b")),
    "frozen at first": (frozen_first, ("a", "b")),
    "a deep copy": (copied, ("a",)),
    "a gradient inside": (gradient_inside, ("a", "b")),
}


def assert_same(net, many, x, *others, ranks):
    """Compare outputs, gradients and parameters with those of a copy on one device."""
    alone = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = alone(x, *(each.value for each in others))
        found = many(x, *others)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    expected.pow(2).mean().backward()
    found.pow(2).mean().backward()
    for (name, one), other in zip(net.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)
        if other.grad is None:
            assert one.grad is None, name
        else:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.several_ranks
@pytest.mark.parametrize("kind", FORWARDS)
def test_a_forward_that_asks_for_its_parameters(kind, ranks):
    function, names = FORWARDS[kind]
    net = Forward(function, **layers(*names)).to(cpu(1)[0])
    x = torch.randn(5, 4, dtype=torch.float64, device=cpu(1)[0])
    if kind in ("a deleted parameter", "a written table", "fast weights"):
        alone = Forward(function, **layers(*names)).to(x.device)
        expected = alone(x)
        torch.testing.assert_close(DataParallel(net, cpu(ranks))(x), expected)
        assert isinstance(net.a.weight, nn.Parameter)
        return
    assert_same(net, DataParallel(net, cpu(ranks)), x, ranks=ranks)


@pytest.mark.several_ranks
def test_an_inner_loop_over_parameters(ranks):
    net = Forward(inner_loop, **layers("a")).to(cpu(1)[0])
    x, support = torch.randn(2, 5, 4, dtype=torch.float64, device=cpu(1)[0])
    assert_same(net, DataParallel(net, cpu(ranks)), x, Replicate(support), ranks=ranks)


@pytest.mark.several_ranks
def test_gradients_of_weights_that_were_frozen_meanwhile(ranks):
    """Fast weights have no parameters of their own to compare; their gradients reach the module's."""
    net = Forward(fast_weights, **layers("a")).to(cpu(1)[0])
    x = torch.randn(5, 4, dtype=torch.float64, device=cpu(1)[0])
    DataParallel(net, cpu(ranks))(x).sum().backward()
    torch.testing.assert_close(net.a.weight.grad, 3 * x.sum(0).expand(4, 4))


def test_replicas_have_names_and_parameters_that_are_no_leaves(ranks):
    net = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2), nn.BatchNorm1d(2)).to(cpu(1)[0])
    for replica in replicate(net, cpu(ranks)):
        assert dict(replica.named_parameters()).keys() == dict(net.named_parameters()).keys()
        assert replica.state_dict().keys() == net.state_dict().keys()
        assert "weight" not in vars(replica[0])
        assert all(isinstance(each, nn.Parameter) and not each.is_leaf for each in replica.parameters())


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Scaled(torch.rand(3, 4), 5.0)
        self.register_buffer("table", torch.ones(3))
        self.table.offset = 2.0

    def forward(self, x):
        assert isinstance(self.weight, Scaled)
        return x @ self.weight.T * self.weight.scale + self.table * self.table.offset


@pytest.mark.parametrize("grad", [True, False])
def test_class_and_attributes_of_parameters_and_buffers_go_along_at_every_call(grad):
    net = Quantised().to(cpu(1)[0])
    net.weight, net.table = Scaled(net.weight.data, 5.0), net.table.clone()
    net.table.offset = 2.0
    many, x = DataParallel(net, cpu(3)), torch.rand(6, 4, device=cpu(1)[0])
    with torch.set_grad_enabled(grad):
        for scale in (5.0, 7.0):
            net.weight.scale = net.table.offset = scale
            torch.testing.assert_close(many(x), net(x))


CANNOT = {
    "assigned back": lambda net, x: setattr(net.a, "weight", net.a.weight),
    "an optimizer": lambda net, x: torch.optim.SGD(net.parameters(), 0.1),
    "a hook after accumulation": lambda net, x: net.a.weight.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_what_copies_cannot_do_is_noted_with_the_cure(kind):
    def forward(net, x):
        CANNOT[kind](net, x)
        return net.a(x)

    net = Forward(forward, **layers("a")).to(cpu(1)[0])
    with pytest.raises((RuntimeError, ValueError, TypeError), match=r"Caught .* in replica 0") as caught:
        DataParallel(net, cpu(2))(torch.randn(4, 4, dtype=torch.float64, device=cpu(1)[0]))
    (note,) = caught.value.__notes__[:1]
    assert "parameters of a replica are copies" in note
    assert "TrainStep" in note


@pytest.mark.slow
def test_generate_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=30, pad_token_id=0
    )

    class Generating(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, ids):
            return self.model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)

    with torch.device("cpu"), torch.no_grad():
        net, ids = Generating().eval(), torch.randint(1, 30, (5, 4))
        assert torch.equal(DataParallel(net, ["cpu"] * 2)(ids), net(ids))
