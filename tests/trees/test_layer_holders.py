"""Lists, dicts, partials and methods that reach layers: those of a replica reach the replica's."""

import gc
import warnings
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from functools import partial
from types import MethodType

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import DataParallel, SyncBatchNorm, TrainStep, replicate
from mgpu_core.trees.layer_holders import attributes_that_reach, rewired

Pair = namedtuple("Pair", "norm act")


class Net(nn.Module):
    """Two layers with statistics, which the forward reaches by a function that is put into an attribute."""

    def __init__(self, hold=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(3, 3).double(), nn.BatchNorm1d(3).double()
        self.reach = lambda net: (net.linear, net.norm)
        if hold is not None:
            self.reach = hold(self)

    def again(self, x):
        return self.norm(self.linear(x))

    def forward(self, x):
        layers = self.reach(self)
        for layer in layers:
            x = layer(x)
        return x


def held(kind):
    """Return a function that puts the layers into a container, and returns how to find them there."""

    def hold(net):
        holder, find = HOLDERS[kind](net)
        net.held = holder
        return find

    return hold


def cyclic(net):
    made = [net.linear, net.norm]
    made.append({"self": made})
    return made


def deep(net):
    made = (net.linear, net.norm)
    for _ in range(40):
        made = [made]
    return made


def dug(net):
    made = net.held
    for _ in range(40):
        (made,) = made
    return made


HOLDERS = {
    "list": lambda net: ([net.linear, net.norm], lambda net: net.held),
    "tuple": lambda net: ((net.linear, net.norm), lambda net: net.held),
    "dict": lambda net: ({"a": net.linear, "b": net.norm}, lambda net: net.held.values()),
    "ordered dict": lambda net: (OrderedDict(a=net.linear, b=net.norm), lambda net: net.held.values()),
    "keys": lambda net: ({net.linear: 1, net.norm: 2}, lambda net: net.held),
    "default dict": lambda net: (
        defaultdict(list, {"all": [net.linear, net.norm]}),
        lambda net: net.held["all"],
    ),
    "named tuple": lambda net: (Pair(net.linear, net.norm), lambda net: (net.held.norm, net.held.act)),
    "partial": lambda net: (partial(nn.Module.__call__, net.linear), lambda net: (net.held, net.norm)),
    "partial of a method": lambda net: (partial(net.again), lambda net: (net.held,)),
    "partial of a layer": lambda net: ([partial(net.linear), partial(net.norm)], lambda net: net.held),
    "keyword of a partial": lambda net: (
        partial(lambda x, layer: layer(x), layer=net.norm),
        lambda net: (net.linear, net.held),
    ),
    "methods in a list": lambda net: ([net.linear.forward, net.norm.forward], lambda net: net.held),
    "a method": lambda net: (net.again, lambda net: (net.held,)),
    "nested": lambda net: ({"all": [(net.linear,), {"norm": [net.norm]}]}, lambda net: (
        net.held["all"][0][0], net.held["all"][1]["norm"][0],
    )),
    "a cycle": lambda net: (cyclic(net), lambda net: net.held[-1]["self"][:2]),
    "forty deep": lambda net: (deep(net), dug),
}  # fmt: skip


def trained(net, how, ranks):
    """Return losses, parameters and buffers after three steps."""
    torch.manual_seed(1)
    losses, optimizer = [], torch.optim.SGD(net.parameters(), 0.1)
    x, y = torch.randn(2, 3, 17, 3, dtype=torch.float64, device=cpu(1)[0])
    if how == "step":
        step = TrainStep(net, nn.functional.mse_loss, optimizer, cpu(ranks), workers="threads")
        losses = [float(step(*batch)) for batch in zip(x, y, strict=True)]
        step.close()
    else:
        many = DataParallel(net, cpu(ranks))
        for inputs, target in zip(x, y, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(many(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, [each.detach().clone() for each in (*net.parameters(), *net.buffers())]


@pytest.mark.several_ranks
@pytest.mark.parametrize("how", ["forward", "step"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_held_layers_are_the_replicas(kind, how, ranks):
    expected = trained(Net().to(cpu(1)[0]), how, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(Net(held(kind)).to(cpu(1)[0]), how, ranks)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one, other)


def test_identity_of_containers_and_entries_is_kept():
    net = Net()
    net.one = net.two = [net.linear, net.norm]
    net.pair = (net.one, net.linear)
    for replica in replicate(net, cpu(2)):
        assert replica.one is replica.two is replica.pair[0]
        assert replica.one is not net.one
        assert replica.pair[1] is replica.linear is replica.one[0]
    assert net.one[0] is net.linear


def test_containers_without_layers_are_the_same_objects():
    net = Net()
    teacher = nn.Linear(3, 3)
    for name, value in {"a": [1, 2], "b": {"x": (1,)}, "c": [teacher], "d": partial(print, 1), "e": [].append}.items():
        setattr(net, name, value)
    inner = ["untouched"]
    net.mixed = [net.linear, inner, teacher]
    for replica in replicate(net, cpu(2)):
        assert all(getattr(replica, name) is getattr(net, name) for name in "abcde")
        assert replica.mixed[1] is inner
        assert replica.mixed[2] is teacher


def test_a_module_that_is_hidden_from_registration():
    net = Net()
    net.__dict__["hidden"] = net.linear
    for replica in replicate(net, cpu(2)):
        assert replica.hidden is replica.linear


def test_the_names_of_attributes():
    net = Net()
    net.a, net.b, net.c = [net.linear], {"k": (net.norm,)}, [1, "2", None]
    modules = list(net.modules())
    assert attributes_that_reach(modules, set(map(id, modules)))[0] == ["a", "b"]
    assert attributes_that_reach([nn.Linear(1, 1), nn.Conv2d(1, 1, 1)], {1}) is None
    assert attributes_that_reach([], set()) is None


def test_a_subclass_of_a_list_is_left_alone():
    class Mine(list):
        pass

    net = Net()
    net.mine = Mine([net.linear])
    assert all(replica.mine is net.mine for replica in replicate(net, cpu(2)))


def test_containers_deeper_than_a_hundred_are_left_alone():
    net, made = Net(), None
    made = [net.linear]
    for _ in range(2000):
        made = [made]
    net.held = made
    assert all(replica.held is made for replica in replicate(net, cpu(2)))
    assert rewired([[1]], {}) == [[1]]


def test_layers_that_are_appended_later_are_the_replicas_too():
    net = Net(lambda net: lambda net: net.held).to(cpu(1)[0])
    net.held = [net.linear]
    many, x = DataParallel(net, cpu(2)), torch.randn(4, 3, dtype=torch.float64, device=cpu(1)[0])
    step = TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.0), cpu(2))
    step(x, x)
    before = net.norm.num_batches_tracked.item()
    net.held.append(net.norm)
    step(x, x)
    assert net.norm.num_batches_tracked.item() == before + 1
    many(x)
    assert net.norm.num_batches_tracked.item() == before + 2


def written(change):
    def hold(net):
        net.held = {"layers": [net.linear, net.norm], "n": 0}

        def find(net):
            change(net.held)
            return net.held["layers"]

        return find

    return hold


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.update(n=held["n"] + 1),
        lambda held: held.setdefault("last", object()),
        lambda held: held.pop("n", None),
    ],
)
def test_writes_into_such_a_container_are_lost_and_told_of(change):
    net = Net(written(change)).to(cpu(1)[0])
    before = dict(net.held)
    with pytest.warns(UserWarning, match="the forward of Net assigns held"):
        DataParallel(net, cpu(2))(torch.randn(4, 3, dtype=torch.float64, device=cpu(1)[0]))
    assert net.held == before


def test_rank_0_of_a_step_keeps_the_users_container():
    net = Net(written(lambda held: held.update(n=held["n"] + 1))).to(cpu(1)[0])
    x = torch.randn(4, 3, dtype=torch.float64, device=cpu(1)[0])
    step = TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.0), cpu(2))
    with pytest.warns(UserWarning, match="assigns held: the module keeps the value of rank 0"):
        step(x, x)
    assert net.held["n"] == 1


class Helper:
    def __init__(self, net):
        self.net = net

    def layers(self):
        return self.net.linear, self.net.norm


UNSEEN = {
    "a closure": lambda net: lambda _: (net.linear, net.norm),
    "a weak reference": lambda net: (lambda reference: lambda _: (reference().linear, reference().norm))(
        weakref.ref(net)
    ),
    "a helper": lambda net: (lambda helper: lambda _: helper.layers())(Helper(net)),
    "a method of a helper": lambda net: (lambda method: lambda _: method())(Helper(net).layers),
    "a set": lambda net: (
        lambda layers: lambda _: sorted(layers, key=lambda layer: type(layer).__name__, reverse=True)
    )({net.linear, net.norm}),
}


@pytest.mark.parametrize("how", ["forward", "step"])
@pytest.mark.parametrize("kind", UNSEEN)
def test_what_cannot_be_made_again_is_told_of_once(kind, how):
    net = Net(UNSEEN[kind]).to(cpu(1)[0])
    x = torch.randn(4, 3, dtype=torch.float64, device=cpu(1)[0])
    many = DataParallel(net, cpu(2))
    step = TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.0), cpu(2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            many(x) if how == "forward" else step(x, x)
    (text,) = [str(each.message) for each in told]
    assert text.startswith("a replica of Net computes with linear.weight of the module itself: a closure")


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.LSTM(4, 4)),
        lambda: nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.BatchNorm1d(3), nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
        Net,
    ],
)
def test_no_false_alarm(make):
    net = make().double().to(cpu(1)[0])
    x = torch.randn(4, 3, dtype=torch.float64, device=cpu(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = DataParallel(net, cpu(2))
        for _ in range(3):
            many(x)


@pytest.mark.parametrize("how", ["forward", "step"])
@pytest.mark.parametrize("kind", ["ranks that meet", "inputs with a graph"])
def test_no_false_alarm_where_graphs_of_ranks_touch(kind, how):
    """Layers that normalise over all ranks join their graphs, and so does what was computed before the cut."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    layers = [first, SyncBatchNorm(3), second] if kind == "ranks that meet" else [first, second]
    net = nn.Sequential(*layers).double().to(cpu(1)[0])
    x = torch.randn(4, 3, dtype=torch.float64, device=cpu(1)[0])
    many = DataParallel(net, cpu(2))
    step = TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.0), cpu(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            given = first(x) if kind == "inputs with a graph" else x
            many(given) if how == "forward" else step(given, x)


@pytest.mark.parametrize("static", [False, True])
def test_attributes_of_buffers_and_parameters_are_followed_by_a_step(static):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mask", torch.ones(3))

        def forward(self, x):
            return self.layer(x) * self.mask * getattr(self.mask, "scale", 1.0) * getattr(self.layer.bias, "scale", 1.0)

    net, x = Scaled().to(cpu(1)[0]), torch.randn(4, 3, device=cpu(1)[0])
    step = TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.0), cpu(2), static_graph=static)
    for scale in (None, 3.0, 5.0):
        if scale is not None:
            net.mask.scale = net.layer.bias.scale = scale
        with torch.no_grad():
            expected = float(nn.functional.mse_loss(net(x), x))
        assert float(step(x, x)) == pytest.approx(expected)


@pytest.mark.parametrize("static", [False, True])
def test_a_static_step_never_mixes_two_modules(static):
    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.on = nn.Linear(3, 3).double(), True

        def forward(self, x):
            return self.layer(x) * (1 if self.on else 0)

    torch.manual_seed(0)
    net = Switched().to(cpu(1)[0])
    x = torch.randn(5, 3, dtype=torch.float64, device=cpu(1)[0])
    step = TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.0), cpu(2), static_graph=static)
    before = float(step(x, x))
    net.on = False
    after = float(nn.functional.mse_loss(net(x), x).detach())
    assert float(step(x, x)) == pytest.approx(before if static else after)
    assert float(step(x[:1], x[:1])) == pytest.approx(
        float(nn.functional.mse_loss(net.layer(x[:1]) if static else torch.zeros_like(x[:1]), x[:1]))
    )
    step.rebuild()
    assert float(step(x, x)) == pytest.approx(after)


def test_methods_in_containers_do_not_keep_replicas_for_ever():
    net = Net().to(cpu(1)[0])
    net.held = [net.again, MethodType(Net.again, net)]
    alive = []
    net.register_forward_pre_hook(lambda replica, _: alive.append(weakref.ref(replica)))
    DataParallel(net, cpu(2))(torch.randn(4, 3, dtype=torch.float64, device=cpu(1)[0]))
    gc.collect()
    assert len(alive) == 2
    assert all(each() is None for each in alive)
