"""Whatever draws random numbers is found by what it does: one seed has one result, and a checkpoint draws it again."""

import random
import threading
import warnings

import numpy as np
import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mgpu_core import DataParallel, Pipeline, TrainStep, parallel_apply

pytestmark = pytest.mark.several_ranks

DRAWN = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand": lambda x: x * (torch.rand(x.shape, device=x.device) > 0.5),
    "randn_like": lambda x: x + torch.randn_like(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
}


class Draws(nn.Module):
    """Has no sign that its forward draws."""

    def __init__(self, kind, reentrant=None):
        super().__init__()
        self.kind, self.reentrant, self.weight = kind, reentrant, nn.Parameter(torch.ones(1))

    def body(self, x):
        for _ in range(20):
            x = DRAWN[self.kind](x)
        return x * self.weight

    def forward(self, x):
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def loss_fn(output, target):
    return (output - target).square().sum()


def trained(kind, ranks, workers, seed):
    net = Draws(kind).to(cpu(1)[0])
    step = TrainStep(
        net, loss_fn, torch.optim.SGD(net.parameters(), lr=1e-3), cpu(ranks), reduction="sum", workers=workers
    )
    x = torch.ones(3 * ranks, 4)
    torch.manual_seed(seed)
    losses = [step(x, x).item() for _ in range(3)]
    return [*losses, net.weight.item(), torch.rand((), device="cpu").item()]


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_one_seed_has_one_result(kind, workers, ranks):
    def run(seed):
        model = DataParallel(Draws(kind).to(cpu(1)[0]), cpu(ranks), workers=workers)
        torch.manual_seed(seed)
        outputs = [model(torch.ones(3 * ranks, 4)) for _ in range(3)]
        return [
            *(each for output in outputs for each in output.flatten().tolist()),
            torch.rand((), device="cpu").item(),
        ]

    for result in (run, lambda seed: trained(kind, ranks, workers, seed)):
        first = result(0)
        assert all(result(0) == first for _ in range(6))
        assert result(1) != first


def test_threads_and_the_caller_draw_the_same(ranks):
    assert trained("dropout", ranks, "threads", 0) == trained("dropout", ranks, "caller", 0)


def test_a_first_call_has_the_bits_of_a_later_one(ranks):
    model, x = DataParallel(Draws("dropout").to(cpu(1)[0]), cpu(ranks)), torch.ones(3 * ranks, 4)
    outputs = []
    for _ in range(3):
        torch.manual_seed(0)
        outputs.append(model(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def differing(output, x):
    """How many elements the backward has masked otherwise than the forward."""
    output.sum().backward()
    return int(((output.to(x.device) != 0) != (x.grad != 0)).sum())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.parametrize("teams", [2, 4])
def test_a_checkpoint_in_a_rank_draws_the_numbers_of_its_forward_again(teams, workers, reentrant):
    model = DataParallel(Draws("dropout", reentrant).to(cpu(1)[0]), cpu(teams), workers=workers)
    for _ in range(3):
        x = torch.ones(32, 4, requires_grad=True)
        output = model(x)
        assert output.count_nonzero() < output.numel()
        assert differing(output, x) == 0


@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_a_checkpoint_in_a_step_draws_the_numbers_of_its_forward_again(workers, ranks):
    net = Draws("rand", reentrant=False).to(cpu(1)[0])
    step = TrainStep(
        net, lambda o, _: o.sum(), torch.optim.SGD([net.weight], lr=1.0), cpu(ranks), reduction="sum", workers=workers
    )
    for _ in range(3):
        before, x = net.weight.item(), torch.ones(64 * ranks, 2)
        loss = step(x, x).item()
        # The loss is the weight times the number that the masks left, and its gradient is that number.
        assert loss == pytest.approx(before * (before - net.weight.item()))


@pytest.mark.parametrize("kind", ["dropout", "rand"])
@pytest.mark.parametrize("how", ["own", "always", "except_last"])
def test_a_pipeline_draws_the_numbers_of_the_forward_again(kind, how):
    net = nn.Sequential(*(Draws(kind, False if how == "own" else None) for _ in range(2)))
    pipeline = Pipeline(
        net, cpu(2), split_points=["1"], chunks=4, checkpoint="never" if how == "own" else how
    )  # fmt: skip
    for _ in range(3):
        x = torch.ones(64, 4, requires_grad=True)
        assert differing(pipeline(x), x) == 0


def test_a_pipeline_has_one_result_of_a_seed():
    def run():
        pipeline = Pipeline(nn.Sequential(Draws("rand"), Draws("dropout")), cpu(2), split_points=["1"], chunks=4)
        torch.manual_seed(0)
        return [pipeline(torch.ones(16, 4)).tolist() for _ in range(2)]

    first = run()
    assert all(run() == first for _ in range(10))


def test_what_draws_nothing_leaves_the_callers_numbers(ranks):
    net, stages = nn.Linear(4, 4).to(cpu(1)[0]), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, pipeline = DataParallel(net, cpu(ranks)), Pipeline(stages, cpu(2), split_points=["1"])
    x = torch.ones(3 * ranks, 4)
    torch.manual_seed(0)
    wanted = torch.rand(2, device="cpu")
    for call in (model, pipeline, lambda x: parallel_apply([net] * ranks, [(x,)] * ranks, devices=cpu(1) * ranks)):
        torch.manual_seed(0)
        call(x)
        assert torch.equal(torch.rand(2, device="cpu"), wanted)


@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_a_forward_that_fails_leaves_the_callers_numbers(workers, ranks):
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("a batch of another kind")

    torch.manual_seed(0)
    before = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(KeyError, match="a batch of another kind"):
            DataParallel(Fails(), cpu(ranks), workers=workers)(torch.ones(3 * ranks, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_draws_is_found(ranks):
    def run():
        net = nn.Linear(4, 1, bias=False).to(cpu(1)[0])
        nn.init.ones_(net.weight)
        step = TrainStep(
            net, lambda o, t: (F.dropout(o) - t).square().sum(), torch.optim.SGD(net.parameters(), lr=1e-3), cpu(ranks),
            reduction="sum", workers="threads",
        )  # fmt: skip
        torch.manual_seed(0)
        return [step(torch.ones(4 * ranks, 4), torch.ones(4 * ranks, 1)).item() for _ in range(3)]

    first = run()
    assert all(run() == first for _ in range(6))


class Later(nn.Module):
    """Draws from its third call on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + torch.rand_like(x) if self.calls > 2 else x


def test_what_draws_later_is_found_and_told_of_once(ranks):
    model, x = DataParallel(Later().to(cpu(1)[0]), cpu(1) * ranks), torch.zeros(4 * ranks, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(x)
    with pytest.warns(RuntimeWarning, match="Later draws random numbers, and its first call .* had drawn none"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = []
        for _ in range(4):
            torch.manual_seed(0)
            outputs.append(model(x).tolist())
    assert outputs.count(outputs[0]) == 4


def test_another_mode_is_found_out_by_itself(ranks):
    """A dropout that is switched on in a net that evaluates, as Monte Carlo dropout does: no warning, one result."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(cpu(1)[0]).eval()
    model, x = DataParallel(net, cpu(ranks)), torch.ones(4 * ranks, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        net[1].train()
        outputs = []
        for _ in range(5):
            torch.manual_seed(0)
            outputs.append(model(x).tolist())
    assert outputs.count(outputs[0]) == 5


def test_numbers_that_another_thread_draws_are_no_reason_to_warn_and_are_not_drawn_again(ranks):
    """As a loader's thread does: its numbers are those of a run without ranks."""
    drawn, turn = [], threading.Barrier(2)

    class Waits(nn.Module):
        def forward(self, x):
            if x.sum() == 0:  # on one rank
                turn.wait(20)
                turn.wait(20)
            return x + 0

    def load():
        for _ in range(6):
            turn.wait(20)
            drawn.append(torch.rand((), device="cpu").item())
            turn.wait(20)

    x = torch.ones(ranks, 1)
    x[1] = 0
    model, loader = DataParallel(Waits().to(cpu(1)[0]), cpu(ranks)), threading.Thread(target=load)
    torch.manual_seed(0)
    wanted = {torch.rand((), device="cpu").item() for _ in range(20)}
    torch.manual_seed(0)
    loader.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            model(x)
    loader.join()
    assert len(set(drawn)) == 6, "no number is drawn twice"
    assert len(wanted & set(drawn)) >= 4, "the draws that seed streams in vain are few"


def with_own_generator(x, generator=torch.Generator("cpu")):  # noqa: B008
    return x + torch.rand(x.shape, device="cpu", generator=generator).to(x.device)


OTHERS = {
    "Python's generator": lambda x: x * random.random(),
    "numpy's generator": lambda x: x * np.random.rand(),
    "a torch.Generator of its own": with_own_generator,
}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("rng", ["auto", "per_rank"])
def test_generators_that_ranks_share_are_told_of_where_threads_draw(name, rng, ranks):
    x = torch.ones(2 * ranks, 2)
    model = DataParallel(Calls(OTHERS[name]).to(cpu(1)[0]), cpu(ranks), rng=rng)
    with pytest.warns(RuntimeWarning, match=f"draws from {name}.*which all ranks share"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        DataParallel(Calls(OTHERS[name]).to(cpu(1)[0]), cpu(ranks), rng=rng, workers="caller")(x)


def test_a_generator_that_a_forward_makes_is_the_ranks_own(ranks):
    model = DataParallel(Calls(lambda x: with_own_generator(x, torch.Generator("cpu"))), cpu(ranks))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = model(torch.zeros(ranks, 4))
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.cpu_only("a wrapper in a wrapper names the first device of the outer one, whose other ranks are elsewhere")
def test_ranks_in_a_rank_draw_one_result(ranks):
    """The outer rank draws nothing but what the inner ranks draw."""

    def run():
        inner = DataParallel(Draws("dropout").to(cpu(1)[0]), cpu(2))
        model = DataParallel(nn.Sequential(inner), cpu(ranks))
        torch.manual_seed(0)
        return [model(torch.ones(6 * ranks, 4)).tolist() for _ in range(3)]

    first = run()
    assert all(run() == first for _ in range(6))
