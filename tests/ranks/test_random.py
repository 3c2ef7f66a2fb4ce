"""One seed, one result: ranks that share a generator draw from streams of their own."""

import threading
import warnings

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_core import DataParallel, parallel_apply
from mgpu_core.ranks import random
from mgpu_core.ranks.random import RankStream, rank_streams

pytestmark = pytest.mark.several_ranks


class DropoutCnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 36, 5)
        )

    def forward(self, x):
        return self.body(x)


def step(model, x, seed=0):
    """Output and gradients of a forward and backward from this seed, and what the default generator draws next."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(x)
    out.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [out.detach(), *grads, torch.rand(3)]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_same_seed_same_bits_in_twenty_runs(ranks):
    model = DataParallel(DropoutCnn(), cpu(ranks))
    x = torch.randn(16, 1, 8, 8)
    first = step(model, x)
    assert all(same(step(model, x), first) for _ in range(19))
    assert not torch.equal(step(model, x, seed=1)[0], first[0])


def test_ranks_draw_different_numbers_and_forwards_too(ranks):
    model = DataParallel(nn.Dropout(0.5), cpu(ranks))
    torch.manual_seed(0)
    x = torch.ones(64 * ranks, 1)
    first, second = model(x).view(ranks, 64), model(x).view(ranks, 64)
    rows = [tuple(row.tolist()) for row in torch.cat([first, second])]
    assert len(set(rows)) == 2 * ranks


def test_one_draw_of_the_default_generator_per_forward():
    model, x = DataParallel(nn.Dropout(0.5), cpu(3)), torch.ones(9, 4)
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_(2**32)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    model(x)
    assert torch.equal(torch.rand(2), wanted)


def test_evaluation_draws_nothing():
    model, x = DataParallel(DropoutCnn(), cpu(2)).eval(), torch.ones(4, 1, 8, 8)
    torch.manual_seed(0)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    model(x)
    assert torch.equal(torch.rand(2), wanted)


class Everything(nn.Module):
    """Draws in many ways, without any attribute that shows it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        rows = x.shape[0]
        drawn = [
            torch.rand(rows, 2),
            torch.randn(rows, 2, generator=None),
            torch.rand_like(x),
            torch.randn_like(x),
            torch.randint(0, 99, (rows, 1)),
            torch.randint(7, (rows, 1)),
            torch.randint_like(x, 9),
            torch.randperm(rows)[:, None],
            torch.normal(x, 1.0),
            torch.bernoulli(torch.full_like(x, 0.5)),
            torch.multinomial(torch.ones(rows, 5), 2),
            torch.empty(rows, 1).uniform_(),
            torch.empty(rows, 1).exponential_(),
            torch.poisson(torch.full((rows, 1), 4.0)),
            torch.native_dropout(x, 0.5, True)[0],
            nn.functional.dropout(x),
            nn.functional.alpha_dropout(x, training=True),
            nn.functional.rrelu(x - 2, training=True),
            nn.functional.gumbel_softmax(x),
            nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.5)[
                0, 0
            ],
            torch.distributions.Gamma(torch.ones(rows, 1), 1.0).sample(),
        ]
        return self.linear(x), torch.cat([each.float() for each in drawn], 1)


def test_per_rank_covers_every_way_to_draw(ranks):
    model, x = DataParallel(Everything(), cpu(ranks), rng="per_rank"), torch.ones(24, 4)

    def run():
        torch.manual_seed(5)
        return model(x)[1].detach()

    first = run()
    assert all(torch.equal(run(), first) for _ in range(10))
    # All columns differ from rank to rank but the few that have few values to choose from.
    chunks = first.view(ranks, -1, first.shape[1])
    alike = [bool((chunks[0, :, column] == chunks[1, :, column]).all()) for column in range(first.shape[1])]
    assert sum(alike) <= first.shape[1] // 4


def test_callers_generator_is_used():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            generator = torch.Generator().manual_seed(3)
            return torch.rand(x.shape[0], 2, generator=generator), torch.empty(x.shape[0]).normal_(
                0, 1, generator=generator
            )

    uniform, normal = DataParallel(Own(), cpu(2))(torch.ones(6, 1))
    assert torch.equal(uniform[:3], uniform[3:])
    assert torch.equal(normal[:3], normal[3:])


def close(one, other):
    """Equal but for the order of sums: backward computes a checkpoint's function in another thread, with more cores."""
    return len(one) == len(other) and all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(one, other, strict=True))


class Block(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.inner = nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 32), nn.RReLU(), nn.Dropout(0.5))
        self.reentrant, self.checkpointed = reentrant, True

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant) if self.checkpointed else self.inner(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_a_rank_draws_the_same_again(ranks, reentrant):
    block = Block(reentrant).double()
    model, x = DataParallel(block, cpu(ranks)), torch.randn(17, 6, dtype=torch.float64)
    with_checkpoint = step(model, x)
    block.checkpointed = False
    assert close(step(model, x), with_checkpoint)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_wrapper_draws_the_same_again(ranks, reentrant):
    first, model = (
        nn.Linear(6, 6),
        DataParallel(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)), cpu(ranks)),
    )
    x = torch.randn(17, 6)

    def around(call):
        torch.manual_seed(0)
        first.zero_grad()
        model.zero_grad()
        out = call(first(x))
        out.square().sum().backward()
        return [out.detach(), first.weight.grad.clone(), model.module[1].weight.grad.clone()]

    assert close(around(lambda h: checkpoint(model, h, use_reentrant=reentrant)), around(model))


def test_data_parallel_inside_data_parallel():
    inner = DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), cpu(2))
    model, x = DataParallel(inner, cpu(3)), torch.ones(12, 4)
    first = step(model, x)
    assert all(same(step(model, x), first) for _ in range(9))


def test_manual_seed_and_state_inside_a_rank_are_the_ranks_own():
    class Seeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            state = torch.get_rng_state()
            one = torch.rand(x.shape[0])
            torch.set_rng_state(state)
            again = torch.rand(x.shape[0])
            torch.manual_seed(7)
            return one, again, torch.rand(x.shape[0])

    torch.manual_seed(0)
    one, again, seeded = DataParallel(Seeds(), cpu(2))(torch.ones(8, 1))
    after = torch.rand(1)
    assert torch.equal(one, again)
    assert not torch.equal(one[:4], one[4:])
    assert torch.equal(seeded[:4], seeded[4:])
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_(2**32)
    assert torch.equal(torch.rand(1), after)  # the default generator noticed nothing


def test_failure_leaves_the_thread_without_a_stream():
    class Fails(nn.Module):
        def forward(self, x, fail):
            if fail:
                raise ValueError("no")
            return torch.full((len(x),), torch._C._len_torch_dispatch_stack())

    model = DataParallel(Fails(), cpu(2))
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(4, 1), True)  # a first call, so with streams
    model.eval()
    modes = [model(torch.ones(4, 1), False).tolist() for _ in range(2)]
    assert modes == [[1] * 4, [0] * 4], "a form that draws nothing has no streams after its first call"


@pytest.mark.parametrize("rng", ["shared", None, 1])
def test_another_rng_is_refused(rng):
    with pytest.raises(ValueError, match="rng must be 'auto' or 'per_rank'"):
        DataParallel(nn.Linear(1, 1), cpu(2), rng=rng)
    with pytest.raises(ValueError, match="rng must be 'auto' or 'per_rank'"):
        parallel_apply([nn.Linear(1, 1)] * 2, [torch.ones(1, 1)] * 2, rng=rng)


def test_parallel_apply_looks_at_every_module_and_takes_any_callable():
    def run(modules):
        torch.manual_seed(0)
        return torch.cat(parallel_apply(modules, [torch.ones(200)] * 3))

    modules = [nn.Identity(), nn.Dropout(0.5), nn.Dropout(0.5)]
    first = run(modules)
    assert all(torch.equal(run(modules), first) for _ in range(10))
    assert torch.equal(run([torch.abs] * 3), torch.ones(600))


class Rated(nn.Module):
    """Looks as if it drew, by the name of an attribute, and does not."""

    def __init__(self):
        super().__init__()
        self.drop_path = 0.5

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("module", "training", "draws"),
    [
        (nn.Dropout(0.1), True, True),
        (nn.Dropout(0.1), False, False),
        (nn.RReLU(), True, True),
        (nn.RReLU(), False, False),
        (nn.FractionalMaxPool2d(2, 2), False, True),
        (nn.LSTM(4, 2, 2, dropout=0.2), True, True),
        (nn.LSTM(4, 2, 2), True, False),
        (nn.TransformerEncoderLayer(4, 2, 4, dropout=0.1), True, True),
        (nn.TransformerEncoderLayer(4, 2, 4, dropout=0.1), False, False),
        (Rated(), True, False),
        (nn.Linear(4, 2), True, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_a_call_that_draws_takes_one_number_of_the_caller_and_no_other_call_does(module, training, draws):
    model, x = DataParallel(module.train(training), cpu(2)), torch.full((6, 3, 4, 4), -1.0)
    x = x[:, 0] if isinstance(module, nn.LSTM | nn.TransformerEncoderLayer) else x
    for _ in range(2):
        torch.manual_seed(0)
        model(x)
        found = torch.rand(2)
        torch.manual_seed(0)
        if draws:
            torch.empty((), dtype=torch.int64).random_(2**32)
        assert torch.equal(found, torch.rand(2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["script", "trace"])
def test_scripts_draw_in_c(way):
    net, x = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), torch.ones(6, 4)
    scripted = torch.jit.script(net) if way == "script" else torch.jit.trace(net, x, check_trace=False)
    model = DataParallel(scripted, cpu(3))
    first = step(model, x)
    assert all(same(step(model, x), first) for _ in range(10))


def test_seeds_of_a_team_differ_whatever_the_base():
    for _ in range(50):
        streams = rank_streams(24)
        assert len({stream.generator.initial_seed() for stream in streams}) == 24


def test_an_operator_that_takes_no_generator_gives_the_default_one_back():
    stream = RankStream(3)
    state = torch.get_rng_state()
    with stream.entered():
        one = torch.native_dropout(torch.ones(50), 0.5, True)[0]
        two = torch.native_dropout(torch.ones(50), 0.5, True)[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one, two)
    with RankStream(3).entered():
        assert torch.equal(torch.native_dropout(torch.ones(50), 0.5, True)[0], one)


def test_the_default_generator_is_one_when_no_rank_draws():
    DataParallel(nn.Dropout(0.5), cpu(2))(torch.ones(4, 2))
    assert torch.random.default_generator is torch.default_generator
    torch.rand(2, generator=torch.random.default_generator)
    with RankStream(3).entered():
        with RankStream(4).entered():
            assert torch.equal(torch.random.default_generator.get_state(), torch.Generator().manual_seed(4).get_state())
        assert torch.equal(torch.random.default_generator.get_state(), torch.Generator().manual_seed(3).get_state())
    assert torch.random.default_generator is torch.default_generator


def test_another_thread_keeps_the_default_generator():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    found = []
    with RankStream(1).entered():
        thread = threading.Thread(target=lambda: found.append(torch.rand(3)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], wanted)


@pytest.mark.parametrize(
    ("version", "has_gil", "warns"), [("2.12.1", False, 1), ("2.12.1", True, 0), ("2.13.0", False, 0)]
)
def test_a_race_of_torch_without_the_gil_is_said_once(monkeypatch, version, has_gil, warns):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    monkeypatch.setattr("sys._is_gil_enabled", lambda: has_gil, raising=False)
    random._first_use.cache_clear()
    model = DataParallel(nn.Dropout(0.5), cpu(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(4, 3))
    random._first_use.cache_clear()
    said = [each for each in caught if "has a race without the GIL" in str(each.message)]
    assert len(said) == warns
    assert all("torch 2.13 or newer" in str(each.message) and each.filename == __file__ for each in said)
