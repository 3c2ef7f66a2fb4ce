"""Containers that layers fill: they get the same objects, on their devices, and others find what they wrote."""

import copy
import dataclasses
import gc
import threading
import weakref
from collections import UserDict, deque
from itertools import product
from typing import NamedTuple

import pytest
import torch
from fakes.nets import cpu
from pipeline.own_code import WIDTH, Block, Plain
from torch import nn

from mgpu_core import Pipeline, TrainStep, place

ROWS = 8


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator, device="cpu").to(cpu(1)[0])


class Giving(Block):
    """Adds a loss to what it is given."""

    def forward(self, x, losses):
        x = super().forward(x)
        losses.append(x.square().mean())
        return x


class Losses(Plain):
    def __init__(self):
        super().__init__(Giving)

    def forward(self, x):
        losses = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


class InATuple(Losses):
    def forward(self, x):
        losses = []
        for block in self.blocks:
            x = block(x, (losses,)[0])
        return x + sum(losses)


class Skipping(Block):
    def forward(self, x, given):
        skips, is_down = given
        if is_down:
            skips.append(x)
            return super().forward(x)
        return super().forward(x) + skips.pop()


class UNet(Plain):
    """A list of skips in a tuple: two layers append, two take away."""

    def __init__(self):
        super().__init__(Skipping)

    def forward(self, x):
        skips = []
        for index, block in enumerate(self.blocks):
            x = block(x, (skips, index < 2))
        assert not skips
        return x


class Reading(Block):
    """As attention that shares keys and values: the first writes, the others read."""

    def forward(self, x, shared):
        if "first" not in shared:
            shared["first"] = x
        return super().forward(x) + shared["first"]


class SharedStates(Plain):
    kind = dict

    def __init__(self):
        super().__init__(Reading)

    def forward(self, x):
        shared = self.kind()
        for block in self.blocks:
            x = block(x, shared=shared)
        assert shared["first"].device == self.blocks[0].linear.weight.device  # where it was made
        return x * shared["first"]


class SharedUserDict(SharedStates):
    kind = UserDict


@dataclasses.dataclass
class State:
    depth: int = 0
    first: torch.Tensor | None = None


class Deeper(Block):
    def forward(self, x, state):
        state.depth += 1
        state.first = x if state.first is None else state.first
        return super().forward(x) * state.depth + state.first


class Record(Plain):
    def __init__(self):
        super().__init__(Deeper)

    def forward(self, x):
        state = State()
        for block in self.blocks:
            x = block(x, state)
        return x * state.depth


class Adding(Block):
    """Writes in place into tensors that it is given."""

    def forward(self, x, sums, count):
        x = super().forward(x)
        sums[0][:, 0] += x.mean(1)
        count += 1
        return x


class Written(Plain):
    def __init__(self):
        super().__init__(Adding)

    def forward(self, x):
        sums, count = [x.new_zeros(len(x), 2)], torch.zeros((), dtype=x.dtype, device=x.device)
        for block in self.blocks:
            x = block(x, sums, count)
        return x * sums[0][:, :1] + count


CACHES = weakref.WeakSet()


class Slot:
    """An object, and no container."""

    keys = None


class Cache:
    """As that of transformers: a layer adds to its slot, and reads all that is in it."""

    def __init__(self, layers):
        self.slots = [Slot() for _ in range(layers)]
        CACHES.add(self)

    def update(self, index, keys):
        slot = self.slots[index]
        slot.keys = keys if slot.keys is None else torch.cat([slot.keys, keys])
        return slot.keys


class Caching(Block):
    def forward(self, x, index, cache):
        return super().forward(x) + cache.update(index, x).square().sum(0)


class Cached(Plain):
    def __init__(self):
        super().__init__(Caching)

    def forward(self, x):
        cache = Cache(len(self.blocks))
        for index, block in enumerate(self.blocks):
            x = block(x, index, cache=cache)
        return x


class Delegating:
    """Changed between the layers, which read it; it cannot be copied by ``copy.copy``, as it has no attribute yet."""

    def __init__(self):
        self.state, self.lock = State(), threading.local()

    def __getattr__(self, name):
        return getattr(self.state, name)


class ReadingDepth(Block):
    def forward(self, x, numbers):
        return (super().forward(x) * (1 + numbers.depth)).sin()


class ChangedBetween(Plain):
    def __init__(self):
        super().__init__(ReadingDepth)

    def forward(self, x):
        numbers = Delegating()
        for block in self.blocks:
            x = block(x, numbers)
            numbers.state.depth += 1
        return x


class Named(NamedTuple):
    log: list
    name: str


class LoggingBlock(Block):
    def forward(self, x, named):
        named.log.append(1)
        return super().forward(x) * len(named.log)


class InANamedTuple(Plain):
    def __init__(self):
        super().__init__(LoggingBlock)

    def forward(self, x):
        named = Named([], "log")
        for block in self.blocks:
            x = block(x, named)
        return x


KINDS = [Losses, InATuple, UNet, SharedStates, SharedUserDict, Record, Cached, ChangedBetween, InANamedTuple]


def pair(kind):
    torch.manual_seed(0)
    net = kind()
    torch.manual_seed(0)
    return net, kind().to(cpu(1)[0])


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("kind", [*KINDS, Written])
def test_a_placed_net_is_that_of_one_device(kind, parts):
    net, whole = pair(kind)
    placed = place(net, cpu(parts))
    wanted, found = whole(batch()), placed(batch())
    assert torch.allclose(found.cpu(), wanted.cpu(), rtol=0, atol=1e-12)
    wanted.sum().backward()
    found.sum().backward()
    for one, other in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(one.grad.cpu(), other.grad.cpu(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b", 4), ("gpipe", 4)])
@pytest.mark.parametrize(
    ("kind", "checkpoint"),
    [*product(KINDS, ["never", "always"]), (Written, "never")],  # torch refuses such writes before it computes again
)
def test_a_step_is_that_of_micro_batches_one_after_the_other(kind, schedule, chunks, checkpoint):
    net, whole = pair(kind)
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=chunks, schedule=schedule, checkpoint=checkpoint)
    step = TrainStep(pipe, lambda output, target: output.square().mean(), torch.optim.SGD(net.parameters(), lr=0.0))
    for _ in range(2):
        whole.zero_grad()
        total = 0.0
        for part in batch().tensor_split(chunks):
            loss = whole(part).square().mean() / chunks
            loss.backward()
            total += float(loss.detach())
        assert float(step(batch(), batch())) == pytest.approx(total, abs=1e-12)
        for one, other in zip(net.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(one.grad.cpu(), other.grad.cpu(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_cache_goes_with_its_graph(checkpoint):
    """Also if no backward follows, as in a first call that is tried again."""
    pipe = Pipeline(Cached(), cpu(2), split_points=["blocks.2"], chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        pipe(batch())
    gc.collect()
    assert not CACHES


class Collecting(Plain):
    """The caller's own list and dict."""

    def __init__(self):
        super().__init__(Giving)

    def forward(self, x, found, named):
        for index, block in enumerate(self.blocks):
            x = block(x, found)
            named.setdefault("all", []).append(index)
        return x


def test_the_lists_of_a_caller_are_filled_in_the_order_of_the_micro_batches():
    net, whole = pair(Collecting)
    net.blocks = nn.ModuleList([net.blocks[index] for index in (0, 1, 2, 3)])
    wanted, found, all_wanted, named = [], [], {}, {"all": []}
    kept = named["all"]
    pipe = Pipeline(net, cpu(2), chunks=3)
    with torch.no_grad():
        pipe(batch(), found, named)
        for part in batch().tensor_split(3):
            whole(part, wanted, all_wanted)
    assert [float(each) for each in found] == pytest.approx([float(each) for each in wanted], abs=1e-12)
    assert kept is named["all"]
    assert named == all_wanted


class Backwards(Collecting):
    def forward(self, x, found, named):
        for index in (2, 3, 0, 1):
            x = self.blocks[index](x, found)
        return x


def test_a_call_that_begins_again_does_not_fill_twice():
    net, found = Backwards(), []
    with torch.no_grad():
        Pipeline(net, cpu(2), chunks=2)(batch(), found, {})
    assert len(found) == 8


class Filling(Plain):
    """A list of the module, which a call that begins again has filled already."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        for index in (2, 3, 0, 1):
            self.seen.append(index)
            x = self.blocks[index](x)
        return x


def test_a_list_of_the_module_is_filled_as_on_one_device():
    net = Filling()
    seen = net.seen
    pipe = Pipeline(net, cpu(2), chunks=2)
    with torch.no_grad():
        pipe(batch())
        assert seen == [2, 3, 0, 1] * 2
        pipe(batch())
    assert seen == [2, 3, 0, 1] * 4


class Running(nn.Module):
    """Carries a value on from batch to batch, in a container."""

    def __init__(self, kept, add):
        super().__init__()
        self.layer, self.kept, self.add = nn.Linear(4, 4), kept, add

    def forward(self, x):
        y = self.layer(x)
        return y - self.add(self.kept, y.detach().mean(0))


def averaged(kept, value):
    kept["mean"] = 0.5 * kept["mean"] + value
    return kept["mean"]


def queued(kept, value):
    kept.append(value)
    return sum(kept)


@pytest.mark.parametrize(
    ("make", "add"),
    [(lambda: {"mean": torch.zeros(4)}, averaged), (lambda: deque([torch.zeros(4)], maxlen=2), queued)],
    ids=["dict", "deque"],
)
def test_a_running_value_in_a_container_goes_on_in_the_order_of_the_micro_batches(make, add):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Running(make(), add), nn.Linear(4, 4)).to(cpu(1)[0])
    plain, x = copy.deepcopy(net), torch.randn(9, 4, device=cpu(1)[0])
    pipeline = Pipeline(net, cpu(2), chunks=3, split_points=["2"])
    for _ in range(3):
        wanted = torch.cat([plain(each) for each in x.chunk(3)])
        assert torch.allclose(pipeline(x).cpu(), wanted.cpu())
