"""A plan is right, or it is refused by the name of a block: heads that are counted, features that are mixed."""

import copy

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention

from mgpu_core import TensorParallel
from mgpu_core.tensor_parallel.plan import suggested_plan

PLAN = {"*.q": "column", "*.k": "column", "*.v": "column", "*.o.0": "row"}
COUNTS = ["heads", "num_heads", "n_head", "n_heads", "num_attention_heads", "nhead"]


class Counted(nn.Module):
    """Attention that splits features by the number of its heads, as code with einops does."""

    def __init__(self, count="heads", heads=4, kv=None):
        super().__init__()
        setattr(self, count, heads)
        self.count, self.num_key_value_heads = count, kv or heads
        self.q, self.o = nn.Linear(16, 16), nn.ModuleList([nn.Linear(16, 16), nn.Dropout(0.5)])
        self.k, self.v = (nn.Linear(16, 16 // heads * self.num_key_value_heads) for _ in range(2))

    def forward(self, x, cache=None):
        heads = getattr(self, self.count)
        q, k, v = (
            each(x).unflatten(-1, (number, -1)).transpose(1, 2)
            for each, number in (
                (self.q, heads),
                (self.k, self.num_key_value_heads),
                (self.v, self.num_key_value_heads),
            )
        )
        if cache is not None:
            k, v = cache.with_past(k, v)
        y = attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)
        for layer in self.o:
            y = layer(y)
        return y


class Cache:
    def __init__(self):
        self.past = []

    def with_past(self, k, v):
        self.past.append((k, v))
        return (torch.cat(each, 2) for each in zip(*self.past, strict=True))


class Fixed(Counted):
    """Counts its heads by a number that nobody can find."""

    def forward(self, x, cache=None):
        self.__dict__["hidden"] = 4
        self.count, self.num_key_value_heads = "hidden", 4
        return super().forward(x, cache)


class Mixed(nn.Module):
    """Normalises the features between a column and a row."""

    def __init__(self, between):
        super().__init__()
        self.q, self.o, self.between = nn.Linear(16, 32), nn.ModuleList([nn.Linear(32, 16)]), between

    def forward(self, x):
        return self.o[0](self.between(self.q(x)))


def net_of(block):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), block).double().to(cpu(1)[0]).eval()


def x_of(*shape):
    return torch.randn(*shape, dtype=torch.float64).to(cpu(1)[0])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("count", COUNTS)
def test_known_numbers_of_heads_are_those_of_the_rank(count, ranks):
    alone, x = net_of(Counted(count)), x_of(2, 5, 16)
    tp = TensorParallel(copy.deepcopy(alone), cpu(ranks), PLAN)
    assert torch.allclose(tp(x), alone(x), rtol=0, atol=1e-12)
    assert getattr(tp.uncut()[1], count) == 4
    assert torch.equal(tp.uncut()(x), alone(x))


def test_heads_of_keys_are_counted_too():
    alone, x = net_of(Counted(kv=2)), x_of(2, 5, 16)
    assert torch.allclose(TensorParallel(copy.deepcopy(alone), cpu(2), PLAN)(x), alone(x), rtol=0, atol=1e-12)


REFUSED = {
    "a number that is not found": lambda: Fixed(),
    "a norm of all features": lambda: Mixed(lambda y: nn.functional.layer_norm(y, y.shape[-1:])),
    "a softmax of all features": lambda: Mixed(lambda y: y.softmax(-1)),
    "features in another order": lambda: Mixed(lambda y: y.unflatten(-1, (2, -1)).flip(-2).cumsum(-2).flatten(-2)),
}


@pytest.mark.parametrize("x", [(2, 5, 16), (2, 1, 16), "alike"], ids=str)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_block_that_is_another_one_in_parts_is_refused_by_name(kind, x):
    """Also by a call of one position, or of positions that are alike, which could not show it."""
    alone = net_of(REFUSED[kind]())
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), {key: PLAN[key] for key in PLAN if hasattr(alone[1], key[2])})
    given = torch.ones(2, 5, 16, dtype=torch.float64, device=cpu(1)[0]) if x == "alike" else x_of(*x)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^1 \(.*\) gives other outputs cut by this plan than uncut: they differ by"
        ):
            tp(given)
    assert torch.equal(tp.uncut()(given), alone(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [lambda: Counted(), lambda: Mixed(torch.tanh)])
def test_no_false_alarm_and_nothing_changes(kind, dtype):
    """A cache that a call fills, training with dropout, random numbers: the comparison leaves no trace."""
    alone = net_of(kind()).to(dtype).train()
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), {key: PLAN[key] for key in PLAN if hasattr(alone[1], key[2])})
    x = x_of(2, 5, 16).to(dtype)
    seen = []
    for net in (alone, tp):
        torch.manual_seed(3)
        seen.append((net(x), torch.get_rng_state()))
    (wanted, before), (found, after) = seen
    assert torch.allclose(found, wanted, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(before, after)
    assert all(each.training for lane in tp._lanes for each in lane.net.modules())
    assert not any(each._forward_pre_hooks for each in tp.uncut().modules())
    found.sum().backward()


class WithCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Counted()

    def forward(self, x, cache):
        return self.layer(x, cache=cache), cache


def test_a_cache_holds_what_the_calls_have_put_there():
    torch.manual_seed(0)
    alone, caches = WithCache().double().to(cpu(1)[0]).eval(), [Cache(), Cache()]
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), {f"layer{key[1:]}": word for key, word in PLAN.items()})
    for length in (1, 1, 3):
        x = x_of(2, length, 16)
        (wanted, caches[0]), (found, caches[1]) = alone(x, caches[0]), tp(x, caches[1])
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    assert len(caches[1].past) == 3


def test_a_block_that_is_called_later_is_compared_then():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Counted(), Fixed()

        def forward(self, x, which):
            return getattr(self, which)(x)

    torch.manual_seed(0)
    tp = TensorParallel(Branches().double().to(cpu(1)[0]).eval(), cpu(2), PLAN)
    x = x_of(2, 5, 16)
    tp(x, "one")
    with pytest.raises(ValueError, match=r"^other \(Fixed\) gives other outputs"):
        tp(x, "other")


def test_random_numbers_inside_a_block_are_not_judged():
    tp = TensorParallel(
        net_of(Mixed(lambda y: nn.functional.dropout(y, 0.5))), cpu(2), {"*.q": "column", "*.o.0": "row"}
    )
    if torch.device(cpu(1)[0]).type == "cpu":
        assert tp(x_of(2, 5, 16)).shape == (2, 5, 16)


# --- What is suggested in place of a plan is right


def test_a_suggested_plan_gathers_what_may_be_attention():
    net = nn.Sequential(Counted(), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
    assert suggested_plan(net) == {
        "*.q": "column_gathered", "*.k": "column_gathered", "*.v": "column_gathered", "*.o.0": "column_gathered",
        "*.0": "column", "*.2": "row",
    }  # fmt: skip
    alone, x = net.double().to(cpu(1)[0]).eval(), x_of(2, 5, 16)
    tp = TensorParallel(copy.deepcopy(alone), cpu(3), suggested_plan(net))
    assert torch.allclose(tp(x), alone(x), rtol=0, atol=1e-12)


class Gated(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.gate, self.up, self.down, self.act = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8), nn.SiLU()
        if norm is not None:
            self.norm = norm

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Reads(Gated):
    def forward(self, x):
        return nn.functional.linear(super().forward(x), self.up.weight)


def test_a_suggested_plan_pairs_what_widens_and_narrows():
    assert suggested_plan(Gated()) == {"gate": "column", "up": "column", "down": "row"}
    assert set(suggested_plan(Gated(nn.LayerNorm(12))).values()) == {"column_gathered"}
    assert suggested_plan(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))) == {
        "0": "column_gathered", "2": "column_gathered"
    }  # fmt: skip
    assert "up" not in suggested_plan(Reads())


def test_a_wrapper_of_a_module_with_a_plan_is_told_what_to_wrap():
    class Planned(nn.Linear):
        tp_plan = {"": "column_gathered"}  # noqa: RUF012

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Planned(4, 4)

    with pytest.raises(ValueError, match=r"that of its model cuts model alone: Loss\(TensorParallel\(\.\.\.\)\)"):
        TensorParallel(Loss(), cpu(2))
