"""Values and state that somebody exchanges count whichever way, and memory that somebody else holds is not written."""

import copy
import warnings
from collections import defaultdict

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn import functional as F

from mgpu_core import TrainStep, optim

OPTIMIZERS = {"torch's": torch.optim.AdamW, "ours": optim.AdamW, "SGD": optim.SGD}
PLAIN = {"torch's": torch.optim.AdamW, "ours": torch.optim.AdamW, "SGD": torch.optim.SGD}
SETTINGS = {"torch's": {}, "ours": {}, "SGD": {"momentum": 0.9}}


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the fused kernels do not serve")
        yield


def net_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double().to(cpu(1)[0])


def batches(count=6):
    generator = torch.Generator("cpu").manual_seed(1)
    found = []
    for _ in range(count):
        x = torch.randn(9, 3, generator=generator, dtype=torch.float64, device="cpu")
        y = torch.randint(0, 4, (9,), generator=generator, device="cpu")
        found.append((x.to(cpu(1)[0]), y.to(cpu(1)[0])))
    return found


def values_of(net):
    return torch.cat([each.detach().flatten() for each in net.parameters()]).clone()


def trained(kind, ranks, between, **settings):
    """The values after six steps; ``between(index, net, optimizer, evaluate)`` follows each; 0 ranks: a plain loop."""
    net = net_of()
    made = (OPTIMIZERS if ranks else PLAIN)[kind]
    optimizer = made(net.parameters(), lr=0.05, **SETTINGS[kind])
    step = TrainStep(net, F.cross_entropy, optimizer, cpu(ranks), **settings) if ranks else None
    for index, (x, y) in enumerate(batches()):
        if step is None:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        else:
            step(x, y)
        evaluate = step.evaluate if step else lambda x, y: F.cross_entropy(net(x), y).detach()
        between(index, net, optimizer, evaluate)
    return values_of(net)


class Swapped:
    """A moving average that is swapped in for an evaluation, after steps 1 and 3; and what was evaluated."""

    def __init__(self, way, ends_with=None):
        self.way, self.average, self.found, self.ends_with = way, None, [], ends_with

    def __call__(self, index, net, optimizer, evaluate):
        if self.average is None:
            self.average = copy.deepcopy(net)
        pairs = list(zip(net.parameters(), self.average.parameters(), strict=True))
        with torch.no_grad():
            for parameter, its in pairs:
                its.lerp_(parameter, 0.1)
        if index in (1, 3):
            self.way(pairs, lambda: self.found.append(evaluate(*batches()[0]).item()))


def by_data(pairs, evaluate):
    for parameter, its in pairs:
        parameter.data, its.data = its.data, parameter.data
    evaluate()
    for parameter, its in pairs:
        parameter.data, its.data = its.data, parameter.data


def by_pointers(pairs, evaluate):
    kept = [parameter.data for parameter, _ in pairs]
    for parameter, its in pairs:
        parameter.data = its.data
    evaluate()
    for (parameter, _), each in zip(pairs, kept, strict=True):
        parameter.data = each


def one_of_them(pairs, evaluate):
    by_data(pairs[1:2], evaluate)


def for_good(pairs, evaluate):
    """Swapped once; the average goes on with what the net had."""
    for parameter, its in pairs:
        parameter.data, its.data = its.data, parameter.data
    evaluate()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", [by_data, by_pointers, one_of_them, for_good])
def test_an_average_that_is_swapped_in_is_evaluated_and_the_training_goes_on(way, kind, ranks):
    plain, ours = Swapped(way), Swapped(way)
    wanted, found = trained(kind, 0, plain), trained(kind, ranks, ours)
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert torch.allclose(values_of(ours.average), values_of(plain.average), rtol=1e-9, atol=1e-12)
    assert ours.found == pytest.approx(plain.found, rel=1e-9)


def test_a_swap_between_calls_of_one_update_keeps_its_gradients(ranks):
    def run(ranks):
        swapped = Swapped(by_data)
        return trained("SGD", ranks, swapped, accumulate=2) if ranks else None

    first = run(ranks)
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for index in range(0, 6, 2):
        x, y = (torch.cat(each) for each in zip(*batches()[index : index + 2], strict=True))
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert torch.allclose(first, values_of(net), rtol=1e-9, atol=1e-12)


def cleared(optimizer, parameter):
    optimizer.state.clear()


def another(optimizer, parameter):
    optimizer.state = defaultdict(dict)


def popped(optimizer, parameter):
    optimizer.state.pop(parameter)


def replaced(optimizer, parameter):
    entry = optimizer.state[parameter]
    name = "exp_avg" if "exp_avg" in entry else "momentum_buffer"
    entry[name] = torch.full_like(entry[name], 0.5)


def replaced_whole(optimizer, parameter):
    optimizer.state[parameter] = {
        name: value.clone() if torch.is_tensor(value) else value for name, value in optimizer.state[parameter].items()
    }
    replaced(optimizer, parameter)


def own_entry(optimizer, parameter):
    optimizer.state[parameter]["mine"] = object()


@pytest.mark.parametrize("kind", ["ours", "SGD"])
@pytest.mark.parametrize("how", [cleared, another, popped, replaced, replaced_whole, own_entry])
def test_state_that_is_taken_away_starts_anew_and_entries_that_are_replaced_count(how, kind, ranks):
    def between(index, net, optimizer, _):
        if index in (1, 2):
            how(optimizer, net[0].weight)

    assert torch.allclose(trained(kind, ranks, between), trained(kind, 0, between), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", [cleared, another, popped, replaced, replaced_whole, own_entry])
def test_in_a_plain_loop_with_ours_too(how):
    def run(made):
        net = net_of()
        optimizer = made(net.parameters(), lr=0.05)
        for index, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            if index in (1, 2):
                how(optimizer, net[0].weight)
        return values_of(net)

    assert torch.allclose(run(optim.AdamW), run(torch.optim.AdamW), rtol=1e-9, atol=1e-12)


def numpy_view(net):
    return net[0].weight.detach().numpy()


def kept_state(net):
    return net.state_dict()


def kept_data(net):
    return [each.data for each in net.parameters()]


def shared(net):
    net.share_memory()


@pytest.mark.parametrize("how", [numpy_view, kept_state, kept_data, shared])
@pytest.mark.parametrize("kind", ["torch's", "ours"])
def test_whoever_holds_the_memory_of_before_is_told_of_once(how, kind):
    with torch.device("cpu"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).cpu().double()
        held = how(net)
        optimizer = OPTIMIZERS[kind](net.parameters(), lr=0.05)
        step = TrainStep(net, F.cross_entropy, optimizer, ["cpu"] * 2)
        x, y = torch.randn(4, 3).double(), torch.randint(0, 4, (4,))
        with pytest.warns(UserWarning, match=r"the memory of 0\.weight.* is held by others, too"):
            step(x, y)
        step(x, y)
    del held


def test_nobody_is_told_of_where_nobody_holds_it(ranks):
    """Tied weights, deep copies and weights that lie in one block are no holders."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.other.weight = self.one.weight

        def forward(self, x):
            return self.other(self.one(x))

    for made in (Tied, lambda: nn.LSTM(3, 3)):
        net = made().double().to(cpu(1)[0])
        clone = copy.deepcopy(net)
        x = torch.ones(6, 3, dtype=torch.float64, device=cpu(1)[0])
        step = TrainStep(
            net, lambda out, y: (out[0] if isinstance(out, tuple) else out).mean(),
            optim.SGD(net.parameters(), lr=0.1), cpu(1) * ranks,
        )  # fmt: skip
        step(x, x)
        step(x, x)
        del clone


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_what_is_taken_away_is_not_in_a_state_that_is_read_before_the_update(ranks, shard):
    def between(index, net, optimizer, _):
        if index == 2:
            optimizer.state.pop(net[0].weight)
            optimizer.load_state_dict(optimizer.state_dict())

    assert torch.allclose(
        trained("ours", ranks, between, shard=shard),
        trained("ours", 0, between),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.several_ranks
def test_shards_follow_what_is_taken_away(ranks):
    """Between updates the optimizer shows none of the state; what stays, stays."""

    def between(index, net, optimizer, _):
        if index == 2:
            optimizer.state.pop(net[0].weight)

    assert torch.allclose(
        trained("ours", ranks, between, shard="optimizer"), trained("ours", 0, between), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_net_that_is_shared_between_steps_goes_on(kind):
    """Its memory moves under the views of the step."""
    warnings.filterwarnings("ignore", "the memory of .* is held by others")

    def between(index, net, optimizer, _):
        if index in (1, 3):
            net.share_memory()

    with torch.device("cpu"):
        net = net_of().cpu()
        other = copy.deepcopy(net)
        optimizer = OPTIMIZERS[kind](net.parameters(), lr=0.05, **SETTINGS[kind])
        plain = PLAIN[kind](other.parameters(), lr=0.05, **SETTINGS[kind])
        step = TrainStep(net, F.cross_entropy, optimizer, ["cpu"] * 3)
        for index, (x, y) in enumerate(batches()):
            x, y = x.cpu(), y.cpu()
            step(x, y)
            plain.zero_grad()
            F.cross_entropy(other(x), y).backward()
            plain.step()
            between(index, net, optimizer, None)
        assert torch.allclose(values_of(net), values_of(other), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_several_steps_over_one_net_are_no_holders(kind, ranks):
    """One after the other, as a cell of a notebook that is run again makes them, and side by side."""
    net, (x, y) = net_of(), batches()[0]
    for _ in range(3):
        step = TrainStep(net, F.cross_entropy, OPTIMIZERS[kind](net.parameters(), lr=0.05), cpu(ranks))
        step(x, y)
    steps = [
        TrainStep(net, F.cross_entropy, OPTIMIZERS[kind](net[i].parameters(), lr=0.05), cpu(ranks)) for i in (0, 2)
    ]
    for each in steps:
        each(x, y)
        step(x, y)
