"""Values that a module writes on itself in a forward: each rank finds its own in the next call."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from fakes.collector import FREES_LATE
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


def test_the_module_has_what_rank_0_has_left():
    tp, alone = pair(Counts, 3)
    for _ in range(3):
        tp(rows())
    assert tp.module.calls == 3
    tp, alone = pair(Appends, 3)
    tp(rows())
    alone(rows())
    (found,) = tp.module.seen
    assert torch.allclose(found, alone.seen[0][:, :3], rtol=0, atol=1e-12)  # its part of seven features


def test_what_the_user_changes_between_calls_reaches_all_ranks():
    tp, alone = pair(CountsInAList, 3)
    for net in (tp.module, alone):
        net.log.extend(["before", "before"])
    for _ in range(2):
        assert torch.allclose(tp(rows()), alone(rows()), rtol=0, atol=1e-12)
    for net in (tp.module, alone):
        net.log = []
    assert torch.allclose(tp(rows()), alone(rows()), rtol=0, atol=1e-12)


def test_a_state_that_calls_and_the_user_have_changed_is_refused():
    tp, alone = pair(Appends, 2)
    tp(rows())
    tp.module.seen.clear()
    with pytest.raises(TypeError, match="a list that calls have written was changed between them"):
        tp(rows())
    tp.module.seen = []
    assert torch.allclose(tp(rows()), alone(rows()), rtol=0, atol=1e-12)


def test_a_call_that_fails_leaves_attributes_as_they_were():
    tp, alone = pair(Counts, 2)
    tp(rows())
    alone(rows())
    with pytest.raises(Exception, match="mat1 and mat2"):
        tp(rows()[:, :3])
    assert torch.allclose(tp(rows()), alone(rows()), rtol=0, atol=1e-12)


def test_hooks_of_the_user_see_the_views_of_all_ranks_and_come_and_go():
    tp, _ = pair(Counts, 2)
    seen = []
    handle = tp.module.up.register_forward_hook(lambda view, args, output: seen.append(output.shape[-1]))
    tp(rows())
    assert sorted(seen[:2]) == [3, 4]
    handle.remove()
    del seen[:]
    tp(rows())
    assert not seen


def test_an_attribute_that_cannot_be_copied_is_refused_by_name_before_anything_changes():
    alone = Counts().double().to(cpu(1)[0])
    alone.stream = (each for each in ())
    with pytest.raises(TypeError, match="stream of Counts, a generator, cannot be copied for each rank"):
        TensorParallel(alone, cpu(2), PLAN)
    alone(rows())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_list_of_parameters_is_refused_by_name_before_anything_changes(frozen):
    alone = Counts().double().to(cpu(1)[0]).requires_grad_(not frozen)
    alone.weights = [alone.up.weight]
    with pytest.raises(TypeError, match="weights of Counts, a list, holds a Parameter or buffer of the module"):
        TensorParallel(alone, cpu(2), PLAN)
    alone(rows())


def test_parts_are_frozen_by_the_module_that_was_given():
    tp, _ = pair(Counts, 2)
    tp.module.up.weight.requires_grad = False
    tp.module.down.requires_grad_(False)
    tp(rows()).sum().backward()
    assert {name for name, each in tp.named_parameters() if each.grad is not None} == {
        "weights.up.bias.0", "weights.up.bias.1"
    }  # fmt: skip
    assert not tp.module.up.weight.requires_grad
    assert tp.module.up.bias.requires_grad
    assert not tp.uncut().down.weight.requires_grad


@pytest.mark.skipif(FREES_LATE, reason="a free-threaded build frees late")
def test_views_are_freed_when_their_graph_is():
    tp, _ = pair(Unbatched, 2)
    views = []
    tp.module.up.register_forward_hook(lambda view, args, output: views.append(weakref.ref(view)))
    tp(rows())
    del views[:]
    gc.disable()
    try:
        loss = tp(rows()).sum()
        loss.backward()
        del loss
        assert len(views) == 2
        assert all(view() is None for view in views)
    finally:
        gc.enable()


def test_the_given_module_says_when_its_parts_are_gone():
    net = Counts().to(cpu(1)[0])
    del_me = TensorParallel(net, cpu(2), PLAN)
    del del_me
    gc.collect()
    with pytest.raises(RuntimeError, match="cut by a TensorParallel that is gone"):
        net.requires_grad_(False)
