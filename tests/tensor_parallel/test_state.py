"""Values that a module writes on itself in a forward: each rank finds its own in the next call."""

import copy
import functools

import numpy
import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import TensorParallel

PLAN = {"up": "column", "down": "row"}
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3])


class Net(nn.Module):
    """A column and a row; between them is a rank's part."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, x):
        return self.down(self.between(torch.tanh(self.up(x))))


class Counts(Net):
    calls = 0

    def between(self, y):
        self.calls += 1
        return y * self.calls


class Assigns(Net):
    """A state of its own features, which each call exchanges."""

    state = None

    def between(self, y):
        self.state = y.detach() if self.state is None else self.state / 2 + y.detach()
        return y + self.state


class Appends(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def between(self, y):
        self.seen.append(y.detach())
        return torch.stack(self.seen).sum(0)


class Memory:
    def __init__(self):
        self.last = {"y": 0.0}


class FillsAnObject(Net):
    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def between(self, y):
        y = y + self.memory.last["y"]
        self.memory.last["y"] = y.detach()
        return y


class WritesATensor(Net):
    """In place, whole rows, which are the same in all ranks."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(4, dtype=torch.float64, device=cpu(1)[0])

    def forward(self, x):
        self.total.add_(x.detach().mean(0))
        return super().forward(x + self.total)

    def between(self, y):
        return y


class CountsInAList(Net):
    def __init__(self):
        super().__init__()
        self.log = []

    def between(self, y):
        self.log.append("call")
        return y * len(self.log)


class ExchangesALayerOnce(Net):
    def between(self, y):
        if not hasattr(self, "act"):
            self.act = nn.GELU()
        return self.act(y)


class Unbatched(Net):
    """Has a forward of its own on the object."""

    def __init__(self):
        super().__init__()
        self.forward = functools.partial(Unbatched.twice, self)

    def twice(self, x):
        return self.down(torch.tanh(self.up(x))) * 2


KINDS = [Counts, Assigns, Appends, FillsAnObject, WritesATensor, CountsInAList, ExchangesALayerOnce, Unbatched]


def pair(kind, ranks):
    torch.manual_seed(0)
    alone = kind().double().to(cpu(1)[0])
    return TensorParallel(copy.deepcopy(alone), cpu(ranks), PLAN), alone


def rows(seed=0):
    return torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(
        cpu(1)[0]
    )


@RANKS
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_call_finds_what_the_calls_before_have_left(kind, ranks):
    """Also after the comparison of the plan, which runs blocks again."""
    tp, alone = pair(kind, ranks)
    for seed in range(4):
        found, wanted = tp(rows(seed)), alone(rows(seed))
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12), seed
    whole = tp.uncut()
    if kind in (Counts, WritesATensor, CountsInAList, ExchangesALayerOnce, Unbatched):
        assert torch.allclose(whole(rows(9)), alone(rows(9)), rtol=0, atol=1e-12)


def test_what_the_user_changes_between_calls_in_all_ranks():
    tp, alone = pair(CountsInAList, 3)
    for each in (tp.each, lambda change: change(alone)):
        each(lambda net: net.log.extend(["before", "before"]))
    for _ in range(2):
        assert torch.allclose(tp(rows()), alone(rows()), rtol=0, atol=1e-12)
    for each in (tp.each, lambda change: change(alone)):
        each(lambda net: net.log.clear())
    assert torch.allclose(tp(rows()), alone(rows()), rtol=0, atol=1e-12)


def test_hooks_of_the_user_are_called_in_all_ranks_and_come_and_go():
    tp, _ = pair(Counts, 2)
    tp(rows())  # after which the plan is compared
    seen = []
    handles = tp.each(
        lambda net: net.up.register_forward_hook(lambda layer, args, output: seen.append(output.shape[-1]))
    )
    tp(rows())
    assert sorted(seen) == [3, 4]
    for handle in handles:
        handle.remove()
    tp(rows())
    assert len(seen) == 2


class Averages:
    """A hook with a state."""

    def __init__(self):
        self.mean = 0.0

    def __call__(self, layer, args, output):
        self.mean = self.mean / 2 + output.detach().mean()
        return output + self.mean


class KeepsItInABuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None, persistent=False)

    def between(self, y):
        mean = y.detach().mean(0)
        self.mean = mean if self.mean is None else (self.mean + mean) / 2
        return y + self.mean


class ReachesOneObjectTwice(Net):
    def __init__(self):
        super().__init__()
        self.store = {"calls": 0}
        self.memory = Memory()
        self.memory.store, self.held = self.store, [self.down, self.store]

    def between(self, y):
        self.store["calls"] += 1
        return y * self.memory.store["calls"] * self.held[1]["calls"]


def hooked():
    net = Counts()
    net.down.register_forward_hook(Averages())
    return net


class HooksItselfOnce(Net):
    hooked = False

    def between(self, y):
        if not self.hooked:
            self.hooked = True
            self.down.register_forward_hook(lambda layer, args, output: output * 2)
        return y


KEPT = {each.__name__: each for each in (KeepsItInABuffer, ReachesOneObjectTwice, HooksItselfOnce)} | {"a hook": hooked}


@RANKS
@pytest.mark.parametrize("kind", KEPT)
def test_state_in_buffers_hooks_and_objects_that_are_reached_twice(kind, ranks):
    tp, alone = pair(KEPT[kind], ranks)
    for seed in range(4):
        assert torch.allclose(tp(rows(seed)), alone(rows(seed)), rtol=0, atol=1e-12), seed


class Scales:
    """An argument that a forward reads, of a kind whose contents are hard to see."""

    __slots__ = ("__weakref__", "by")

    def __init__(self, by):
        self.by = by

    def scale(self, y):
        return self.by(y) if callable(self.by) else y * float(self.by[0])


class ReadsAnArgument(Net):
    def forward(self, x, scales):
        return self.down(scales.scale(torch.tanh(self.up(x))))


CHANGES = {
    "numpy": (lambda: numpy.ones(2), lambda by: by.__setitem__(0, 3)),
    "bytes": (lambda: bytearray(b"\x01\x01"), lambda by: by.__setitem__(0, 3)),
    "list": (lambda: [1.0, float("nan")], lambda by: by.__setitem__(0, 3)),
}


@pytest.mark.parametrize("kind", [*CHANGES, "function", "exchanged"])
def test_an_argument_that_the_user_changes_between_calls_is_read_anew(kind):
    tp, alone = pair(ReadsAnArgument, 2)
    made, change = CHANGES.get(kind, (lambda: torch.sin, None))
    scales = Scales(made())
    for _ in range(3):
        assert torch.allclose(tp(rows(), scales), alone(rows(), scales), rtol=0, atol=1e-12)
    if change is not None:
        change(scales.by)
    else:
        scales.by = torch.cos if kind == "function" else [2.0]
    assert torch.allclose(tp(rows(), scales), alone(rows(), scales), rtol=0, atol=1e-12)
