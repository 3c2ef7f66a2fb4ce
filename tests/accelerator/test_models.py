"""Models of all sorts under ``DataParallel`` on fake devices and mixed teams: gradients, modes, outputs."""

import copy

import pytest
import torch
from fakes.accelerator import TEAMS, fakes
from fakes.nets import Cnn, Embedded, Lstm, Polynomial, chunks, whole
from fakes.tensors import devices_of, gradients, numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_core import DataParallel, Replicate

every_team = pytest.mark.parametrize("team", TEAMS, ids="-".join)
on_fakes = pytest.mark.parametrize("team", [team for team in TEAMS if "cpu" not in team], ids="-".join)
several = pytest.mark.parametrize("team", [team for team in TEAMS if len(team) > 1], ids="-".join)


@on_fakes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_the_ranks(team, dtype):
    net = whole(nn.Linear(3, 2)).to(team[0])
    seen = []
    net.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    x = numbers(8, 3, device=team[0])
    with torch.autocast("fake", dtype=dtype):
        out = DataParallel(net, team)(x)
    assert seen == [dtype] * len(team)
    assert out.dtype is dtype
    out.sum().backward()
    assert net.weight.grad.dtype is torch.float32
    assert net.weight.grad.tolist() == x.sum(0).expand(2, 3).tolist()
    assert DataParallel(net, team)(x).dtype is torch.float32


@several
def test_double_backward(team):
    plain = Polynomial().to(team[0])
    net = copy.deepcopy(plain)
    x = numbers(9, 3, device=team[0])
    for model, each in ((DataParallel(net, team), net), (plain, plain)):
        grads = torch.autograd.grad(model(x).sum(), list(each.first.parameters()), create_graph=True)
        sum((grad**2).sum() for grad in grads).backward()
    assert gradients(net) == gradients(plain)
    assert any(grad is not None for grad in gradients(plain).values())


class Unused(Polynomial):
    """Has a parameter that nobody uses, and one that only the rank of the first row does."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2))
        self.once = nn.Parameter(torch.ones(2))

    def forward(self, x):
        out = super().forward(x)
        return out + self.once if x[0, 0] == 0 else out


@several
def test_unused_parameters_have_no_gradient(team):
    net = Unused().to(team[0])
    x = torch.arange(16.0, device=team[0]).repeat(3, 1).t()
    DataParallel(net, team)(x).sum().backward()
    assert net.idle.grad is None
    assert net.once.grad.tolist() == [chunks(16, len(team))[0]] * 2


class Nest(Polynomial):
    def forward(self, x, *, scale, table):
        y = super().forward(x) * scale + table.sum()
        return {"y": y, "rest": [(x[:, 0], "text", None)], "max": y.max(1)}


@every_team
@pytest.mark.parametrize("rows", [2, 9])
def test_nested_outputs_scalars_and_whole_tables(team, rows):
    plain = Nest().to(team[0])
    x, scale, table = numbers(rows, 3), torch.tensor(2.0, device="cpu"), numbers(5, device="fake:2")
    kwargs = {"scale": scale, "table": Replicate(table)}
    out = DataParallel(plain, team)(x, **kwargs)
    wanted = plain(x.to(team[0]), scale=scale.to(team[0]), table=table.to(team[0]))
    assert out["y"].tolist() == wanted["y"].tolist()
    assert out["rest"][0][0].tolist() == x[:, 0].tolist()
    assert out["rest"][0][1:] == ("text", None)
    assert out["max"].indices.tolist() == wanted["max"].indices.tolist()


@several
@pytest.mark.parametrize("sparse", [True, False])
def test_embeddings(team, sparse):
    plain = Embedded(sparse).to(team[0])
    net = copy.deepcopy(plain)
    x = torch.tensor([[1, 4], [1, 1], [0, 5], [2, 2], [3, 1], [5, 5], [4, 4], [0, 1]], device=team[0])
    for model in (DataParallel(net, team), plain):
        model(x).sum().backward()
    grad, wanted = net.embedding.weight.grad, plain.embedding.weight.grad
    assert grad.layout is wanted.layout is (torch.sparse_coo if sparse else torch.strided)
    assert grad.to_dense().tolist() == wanted.to_dense().tolist()
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    assert net.embedding.weight.tolist() == (plain.embedding.weight - wanted.to_dense()).tolist()


@several
def test_batch_norm_has_the_statistics_of_rank_0(team):
    net = Cnn().to(team[0])
    alone = copy.deepcopy(net)
    x = numbers(16, 1, 4, 4, device=team[0])
    DataParallel(net, team)(x).sum().backward()
    alone(x[: chunks(16, len(team))[0]])
    assert net.norm.running_mean.tolist() == alone.norm.running_mean.tolist()
    assert net.norm.num_batches_tracked.item() == 1
    assert set(devices_of(p.grad for p in net.parameters())) == {team[0]}
    got, wanted = DataParallel(net.eval(), team)(x), net(x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@several
def test_lstm(team):
    plain = Lstm().double().to(team[0])
    net = copy.deepcopy(plain)
    x = numbers(9, 3, 4, device=team[0]).double()
    for model in (DataParallel(net, team), plain):
        model(x).sum().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)


@several
def test_one_seed_gives_the_same_random_numbers_in_every_run(team):
    """Ranks on one device take turns at its generator; several on the CPU would have streams of their own."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)).to(team[0])
    wrapper = DataParallel(net, team)
    x = torch.ones(32, 4, device=team[0])
    found = set()
    for _ in range(10):
        torch.manual_seed(5)
        found.add(str(wrapper(x).tolist()))
    assert len(found) == 1


@several
def test_a_default_device_of_the_team_is_the_ranks_own(team):
    made = []

    class Makes(nn.Module):
        def forward(self, x):
            made.append((str(torch.ones(1).device), str(x.device)))
            return x

    with torch.device(team[0]):
        DataParallel(Makes(), team)(numbers(16, 2))
    assert sorted(made) == sorted((device, device) for device in team)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = whole(nn.Linear(4, 4))
        self.inner = nn.Sequential(nn.Dropout(0.5), whole(nn.Linear(4, 4), seed=1), nn.Dropout(0.5))
        self.reentrant = None

    def forward(self, x):
        x = self.first(x)
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


@on_fakes
def test_a_checkpoint_inside_a_rank_draws_the_same_again(team):
    """Not with the CPU in the team: torch's checkpoints set its generator in every device's autograd thread."""
    net = Block().to(team[0])
    wrapper = DataParallel(net, team)
    found = []
    for net.reentrant in (None, True, False):
        torch.manual_seed(3)
        net.zero_grad()
        wrapper(numbers(16, 4)).sum().backward()
        found.append(gradients(net))
    assert found == [found[0]] * 3


@pytest.mark.parametrize(
    "team", [["fake:0"] * 3, ["fake:0", "fake:1", "fake:0", "fake:1"], fakes(4), ["fake:0", "cpu", "cpu"]], ids=str
)
def test_one_seed_gives_one_result_whoever_shares_a_generator(team):
    """Ranks of one device take turns in rank order, CPU ranks have streams, devices have generators of their own."""
    model = DataParallel(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).to(team[0]), team)
    x = torch.ones(3 * len(team), 4, device=team[0])

    def run():
        torch.manual_seed(3)
        return model(x).tolist()

    first = run()
    assert all(run() == first for _ in range(15))
    halves = [str(first[rank * 3 : rank * 3 + 3]) for rank in range(len(team))]
    assert all(halves[rank] != halves[0] for rank in range(1, len(team)) if team[rank] in ("fake:0", "cpu"))


class WhereAmI(nn.Module):
    """Makes a tensor without saying where."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        made = torch.zeros(len(x), 1)
        assert made.device == x.device, f"made on {made.device}, the rank is on {x.device}"
        return x * self.weight + made


@pytest.mark.parametrize("team", [fakes(2), fakes(8), ["fake:0", "cpu"], ["cpu", "fake:1"]], ids=str)
def test_a_default_device_of_the_team_is_each_ranks_own(team):
    x = torch.ones(2 * len(team), 1, device=team[0])
    model = DataParallel(WhereAmI().to(team[0]), team)
    with torch.device(team[0]):
        assert model(x).tolist() == x.tolist()
    with torch.device("meta"), pytest.raises(AssertionError, match="made on meta"):
        model(x)
