"""Attributes of modules that the user changes between two steps, and those that forwards change themselves."""

import threading
import warnings
import weakref
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
from fakes.graphs import give_graphs, without_gpu
from fakes.nets import cpu
from torch import nn
from torch.optim import SGD
from train.nets import RANKS, Pair, batches, here, mse

from mgpu_core import TrainStep
from mgpu_core.train.graph_cache import WARM_UP
from mgpu_core.train.inside import Inside


class Child(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(x) * self.config.scale


class Scaled(nn.Module):
    """All that it is multiplied by is found in attributes of all kinds."""

    def __init__(self):
        super().__init__()
        self.config = Namespace(scale=1.0, inner=SimpleNamespace(scale=1.0))
        self.child = Child(self.config)
        self.scale = 1.0
        self.listed, self.named = [1.0], {"a": {"b": [1.0]}}
        self.tensor = here(torch.ones((), dtype=torch.float64))
        self.function, self.mode = torch.nn.functional.softplus, "as it is"
        self.method = self.scaled
        self.optional = 1.0
        self.double()

    def scaled(self, x):
        return self.scale * x

    def forward(self, x):
        x = self.method(self.child(x)) * self.config.inner.scale * self.listed[0] * self.named["a"]["b"][0]
        return self.function(x) * self.tensor * (1 if self.mode == "as it is" else 3) * getattr(self, "optional", 2)


class Other(Child):
    def forward(self, x):
        return self.last(x) * 7


def tripled(self, x):
    return 3 * x.tanh() + self.scale


def begun(net, ranks=2, lr=0.05, rows=9):
    """The net, a step over it, and a batch for it."""
    (x, y), *_ = batches(1, rows)
    return net, TrainStep(net, mse, SGD(net.parameters(), lr=lr), cpu(ranks)), x, y


def captured(net, monkeypatch):
    """A step that records, and changes no parameter."""
    give_graphs(monkeypatch, "cpu")
    settings = {"error_if_nonfinite": False, "capture": True}
    return without_gpu(TrainStep(net, mse, SGD(net.parameters(), lr=0.0), cpu(2), **settings))


CHANGES = {
    "number": lambda net: setattr(net, "scale", 2.0),
    "word": lambda net: setattr(net, "mode", "another"),
    "list": lambda net: setattr(net, "listed", [2.0]),
    "entry": lambda net: net.listed.__setitem__(0, 2.0),
    "deep entry": lambda net: net.named["a"]["b"].__setitem__(0, 2.0),
    "shared object": lambda net: setattr(net.config, "scale", 2.0),
    "object in an object": lambda net: setattr(net.config.inner, "scale", 2.0),
    "tensor": lambda net: setattr(net, "tensor", here(torch.full((), 2.0, dtype=torch.float64))),
    "written tensor": lambda net: net.tensor.fill_(2.0),
    "function": lambda net: setattr(net, "function", torch.tanh),
    "method": lambda net: setattr(net, "method", MethodType(tripled, net)),
    "forward": lambda net: setattr(net, "forward", MethodType(tripled_forward, net)),
    "gone": lambda net: delattr(net, "optional"),
    "in a child": lambda net: setattr(net.child, "config", Namespace(scale=5.0)),
}


def tripled_forward(self, x):
    return 3 * self.child(x) * self.scale


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_user_changes_counts_for_all_ranks(name, ranks):
    torch.manual_seed(0)
    pair = Pair(Scaled(), partial(SGD, lr=0.05, momentum=0.9), ranks)
    for i, (x, y) in enumerate(batches(6, 9)):
        if i in (0, 3):  # also before the first step
            for net in (pair.net, pair.alone) if i else ():
                CHANGES[name](net)
        ours, theirs = pair.both(x, y)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    assert pair.far() < 1e-12


@pytest.mark.parametrize("name", CHANGES)
def test_also_before_the_first_step_and_for_an_evaluation(name):
    torch.manual_seed(0)
    pair = Pair(Scaled(), partial(SGD, lr=0.05), 2)
    for net in (pair.net, pair.alone):
        CHANGES[name](net)
    (x, y), *_ = batches(1, 9)
    assert torch.allclose(pair.step.evaluate(x, y), mse(pair.alone(x), y), rtol=0, atol=1e-12)


def test_copies_share_what_the_modules_share():
    net = Scaled()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.05), cpu(3))
    net.config.scale = 2.0
    (x, y), *_ = batches(1, 9)
    step(x, y)
    configs = [module.config for module in step._engine.parts.replicas.modules]
    assert [each.scale for each in configs] == [2.0] * 3
    assert len({id(each) for each in configs}) == 3
    assert all(module.child.config is module.config for module in step._engine.parts.replicas.modules)


class Counting(nn.Module):
    """A forward that counts, keeps its last output, and remembers whether that of the step before was still there."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2).double()
        self.calls, self.kept, self.history = 0, None, []
        self.was_alive = []

    def forward(self, x):
        self.calls += 1
        self.history.append(len(x))
        before = None if self.kept is None else weakref.ref(self.kept)
        self.kept = None
        self.was_alive.append(before is not None and before() is not None)
        self.kept = self.last(x) * 1
        return self.kept


def test_what_a_forward_changes_stays_its_ranks_own():
    net = Counting()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.05), cpu(2))
    modules = step._engine.parts.replicas.modules
    for x, y in batches(5, 9):
        step(x, y)
    assert [each.calls for each in modules] == [5, 5]
    assert [each.history for each in modules] == [[5] * 5, [4] * 5]
    assert [len(each.kept) for each in modules] == [5, 4]
    assert not any(modules[0].was_alive[2:])  # once it is known that each forward makes another
    assert not any(modules[1].was_alive)


def test_what_the_user_resets_is_reset_in_all_ranks():
    net = Counting()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.05), cpu(2))
    modules = step._engine.parts.replicas.modules
    for i, (x, y) in enumerate(batches(5, 9)):
        if i == 3:
            net.calls, net.kept = 100, None
            net.history.clear()
        step(x, y)
    assert [each.calls for each in modules] == [102, 102]
    assert [each.history for each in modules] == [[5, 5], [4, 4]]


def test_what_is_changed_before_a_call_that_is_refused_counts_for_the_next_one():
    net, step, x, y = begun(Scaled(), lr=0.0, rows=8)
    step(x, y)
    net.scale = 2.0
    handle = net.child.last.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(RuntimeError, match="has got or lost a hook"):
        step(x, y)
    handle.remove()
    assert torch.allclose(step(x, y), mse(net(x), y), rtol=0, atol=1e-12)


def test_what_is_changed_behind_a_check_of_the_replicas_is_seen():
    net, step, x, y = begun(Counting())
    for _ in range(3):
        step(x, y)
    step.check_replicas()
    net.calls = 100
    step(x, y)
    assert [each.calls for each in step._engine.parts.replicas.modules] == [101, 101]


def test_what_a_forward_of_the_users_own_leaves_is_everybodys():
    net, step, x, y = begun(Counting())
    for _ in range(3):
        step(x, y)
    other = step._engine.parts.replicas.modules[1]
    kept = other.kept
    net(x)
    step.evaluate(x[:1], y[:1])  # rank 1 rests
    assert other.kept is not kept
    assert len(other.kept) == 9
    assert other.kept.grad_fn is None
    assert other.calls == net.calls - 1 == 4


def test_a_tensor_with_a_graph_is_copied_without_it():
    net, step, x, y = begun(Scaled())
    step(x, y)
    net.tensor = net.child.last.weight.sum() * 2
    step(x, y)
    twin = step._engine.parts.replicas.modules[1].tensor
    assert twin.item() == net.tensor.item()
    assert twin.grad_fn is None


def test_what_cannot_be_copied_is_told_once():
    net, step, x, y = begun(Scaled(), 3)
    step(x, y)
    net.lock = threading.Lock()
    with pytest.warns(UserWarning, match=r"attribute lock of Scaled was changed, and cannot be copied .*lock") as told:
        step(x, y)
    assert len(told) == 1
    assert told[0].filename == __file__
    net.lock = threading.Lock()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x, y)
    assert not any(hasattr(each, "lock") for each in step._engine.parts.replicas.modules[1:])
    net.lock = 5  # and what can be copied again, is
    step(x, y)
    assert [each.lock for each in step._engine.parts.replicas.modules] == [5] * 3


def test_what_holds_more_than_data_is_not_copied():
    net, step, x, y = begun(Scaled())
    step(x, y)
    net.trainer = Namespace(model=net, steps=1)
    with pytest.warns(UserWarning, match=r"attribute trainer of Scaled was changed.*Namespace holds more than data"):
        step(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.trainer.steps = 2
        step(x, y)
    assert not hasattr(step._engine.parts.replicas.modules[1], "trainer")


class WithTrainer(Scaled):
    """Its copies have none, as those of a LightningModule."""

    trainer = None

    def __getstate__(self):
        return self.__dict__ | {"trainer": None}


@pytest.mark.filterwarnings("error")
def test_a_class_may_know_itself_what_its_copies_have():
    net, step, x, y = begun(WithTrainer(), lr=0.0, rows=8)
    for i in range(3):
        net.trainer = Namespace(model=net, steps=i)
        net.scale = 1.0 + i
        assert torch.allclose(step(x, y), mse(net(x), y), rtol=0, atol=1e-12)
    assert step._engine.parts.replicas.modules[1].trainer is None


def test_a_rate_of_dropout_gives_ranks_numbers_of_their_own():
    results = set()
    for _ in range(10):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.0), nn.Linear(64, 2)).double()
        step = TrainStep(net, mse, SGD(net.parameters(), lr=0.05), cpu(4))
        (x, y), *_ = batches(1, 16)
        step(x, y)
        net[1].p = 0.5
        step(x, y)
        results.add(float(step(x, y)))
        step.close()
    assert len(results) == 1


def test_a_graph_has_the_attributes_that_it_was_recorded_with(monkeypatch):
    net = Scaled()
    step = captured(net, monkeypatch)
    recorder = step._engine.parts.captured.recorder
    (x, y), *_ = batches(1, 8)
    for _ in range(8):
        step(x, y)
    assert recorder.records == 1
    net.config.inner.scale = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = [step(x, y) for _ in range(8)]
    assert recorder.records == 2
    assert torch.allclose(losses[-1], mse(net(x), y), rtol=0, atol=1e-12)


def test_what_is_changed_before_every_step_is_in_no_graph(monkeypatch):
    net = Scaled()
    step = captured(net, monkeypatch)
    (x, y), *_ = batches(1, 8)
    step(x, y)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(20):
            net.scale = 1.0 + i
            assert torch.allclose(step(x, y), mse(net(x), y), rtol=0, atol=1e-12)
    assert ["attributes of the module are changed before every step" in str(each.message) for each in told] == [True]
    assert step.graphs.replays == 0
    for _ in range(WARM_UP + 3):
        step(x, y)
    assert step.graphs.replays == 3  # as soon as they stay


def test_what_forwards_count_is_in_no_graph(monkeypatch):
    net = Counting()
    step = captured(net, monkeypatch)
    (x, y), *_ = batches(1, 8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(20):
            step(x, y)
    assert ["its forward changes attribute calls of Counting" in str(each.message) for each in told] == [True]
    assert net.calls == 20
    assert step.graphs.replays == 0


def test_what_is_very_large_is_one_thing():
    large, endless = list(range(5000)), []
    endless.append(endless)
    assert Inside([[], large]).look() is None
    assert Inside({"a": endless}).containers == [{"a": endless}, endless]
    changed = Inside([1, [2]]).look()
    assert not changed.is_over()


def test_what_is_looked_into():
    class Own:
        def __init__(self):
            self.inner = [1]

    class Careful(Own):
        def __deepcopy__(self, memo):
            return self

    own = Own()
    parameter, tensor = nn.Parameter(torch.ones(1)), torch.ones(1)
    inside = Inside((own, {3}, parameter, tensor, len, Own, torch.float16, Path(), test_what_is_looked_into))
    assert inside.containers == [vars(own), own.inner]
    assert inside.tensors == [tensor]
    assert inside.is_data
    assert Inside([nn.Linear(1, 1), Careful(), [tensor]]).containers[1] == [tensor]  # what is listed, is not one thing
    for more in (nn.Linear(1, 1), Careful(), threading.Lock(), SGD([parameter], lr=1)):
        own.more = [more]
        assert not Inside([own]).is_data
        assert Inside([own]).look() is None
    del own.more
    look = inside.look()
    parameter.data.add_(1)
    assert not look.is_over()
    tensor.add_(1)
    assert look.is_over()
    with torch.inference_mode():
        assert Inside(torch.ones(1)).look() is None  # nobody counts its writes
