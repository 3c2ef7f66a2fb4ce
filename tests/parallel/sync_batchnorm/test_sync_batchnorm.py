"""SyncBatchNorm over ranks is BatchNorm over the whole batch: outputs, gradients, running statistics."""

import copy
import gc
import threading

import pytest
import torch
from fakes.collector import no_collector, wake_workers
from fakes.nets import cpu
from step.nets import compiled_in_place, compiled_root, mse
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import mgpu_core
from mgpu_core import DataParallel, SyncBatchNorm, TrainStep, convert_sync_batchnorm, parallel_apply


class Net(nn.Module):
    def __init__(self, layer=nn.BatchNorm2d, **settings):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3, padding=1), layer(3, **settings)
        self.again = layer(3, **settings)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.last(self.again(x).mean((2, 3)))


def data(rows=16, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    made = [
        torch.randn(rows, *shape, generator=generator, dtype=torch.float64, device="cpu") for shape in ((2, 4, 4), (2,))
    ]
    return [each.to(torch.get_default_device()) for each in made]


def nets(**settings):
    torch.manual_seed(0)
    alone = Net(**settings).double()
    return alone, convert_sync_batchnorm(copy.deepcopy(alone))


def same(one, other, atol=1e-10):
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=atol), name


@pytest.mark.parametrize("settings", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_the_drop_in(ranks, settings):
    alone, net = nets(**settings)
    model = DataParallel(net, cpu(ranks))
    for i in range(3):
        x, y = data(seed=i)
        x.requires_grad_()
        theirs = x.detach().clone().requires_grad_()
        out, wanted = model(x), alone(theirs)
        assert torch.allclose(out, wanted)
        mse(out, y).backward()
        mse(wanted, y).backward()
        assert torch.allclose(x.grad, theirs.grad)
        for a, b in zip(net.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, atol=1e-10)
    same(net, alone)


@pytest.mark.parametrize("rows", [16, 19])
def test_the_step(ranks, rows):
    alone, net = nets()
    reference = SGD(alone.parameters(), lr=0.1, momentum=0.9)
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1, momentum=0.9), cpu(ranks))
    for i in range(5):
        x, y = data(rows, seed=i)
        loss = step(x, y)
        reference.zero_grad()
        wanted = mse(alone(x), y)
        wanted.backward()
        reference.step()
        assert torch.allclose(loss, wanted.detach())
    same(net, alone)
    step.check_replicas()


@pytest.mark.several_ranks
def test_evaluating_is_the_plain_layer(ranks):
    alone, net = nets()
    x, _ = data()
    DataParallel(net, cpu(ranks))(x)
    alone(x)
    net.eval()
    alone.eval()
    assert torch.allclose(DataParallel(net, cpu(ranks))(x), alone(x))
    assert torch.allclose(net(x), alone(x)), "and so it is outside of the ranks"


@pytest.mark.several_ranks
def test_fewer_rows_than_ranks(ranks):
    alone, net = nets()
    x, _ = data(3)
    assert torch.allclose(DataParallel(net, cpu(ranks))(x), alone(x))


@pytest.mark.parametrize("how", ["drop-in", "step"])
def test_a_rank_with_one_row_names_the_cure(how, ranks):
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(cpu(1)[0])
    x, y = torch.ones(ranks, 4), torch.ones(ranks, 3)
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(ranks))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as told:
        step(x, y) if how == "step" else DataParallel(net, cpu(ranks))(x)
    cured = [note for note in getattr(told.value, "__notes__", []) if "convert_sync_batchnorm(net)" in note]
    assert len(cured) == (ranks > 1)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_converting_keeps_the_tensors(layer):
    net = nn.Sequential(nn.Linear(2, 3), layer(3, eps=0.1, momentum=0.3), nn.ReLU())
    before = [*net.parameters(), *net.buffers()]
    net.eval()
    assert convert_sync_batchnorm(net) is net
    assert isinstance(net[1], SyncBatchNorm)
    assert (net[1].eps, net[1].momentum, net[1].training) == (0.1, 0.3, False)
    assert all(a is b for a, b in zip(before, [*net.parameters(), *net.buffers()], strict=True))
    assert isinstance(convert_sync_batchnorm(layer(3)), SyncBatchNorm)
    assert convert_sync_batchnorm(net[1]) is net[1]


def without(name, **settings):
    layer = nn.BatchNorm1d(4, **settings)
    setattr(layer, name, None)
    return layer


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_half_of_an_affine_layer(ranks, name):
    alone = nn.Sequential(nn.Linear(2, 4), without(name)).double()
    net = convert_sync_batchnorm(copy.deepcopy(alone))
    x = torch.randn(9, 2, dtype=torch.float64)
    for forward in (alone, DataParallel(net, cpu(ranks))):
        forward(x).pow(3).sum().backward()
    for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-10)


def test_statistics_that_were_taken_away(ranks):
    alone = without("running_mean")
    alone.running_var = None
    net = convert_sync_batchnorm(copy.deepcopy(alone))
    x = torch.randn(9, 4)
    assert torch.allclose(DataParallel(net, cpu(ranks))(x), alone(x), atol=1e-6)


@pytest.mark.parametrize("affine", [True, False])
def test_a_gradient_that_is_differentiated_again(ranks, affine):
    """As a gradient penalty does."""
    alone = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=affine), nn.Tanh(), nn.Linear(3, 1)).double()
    net = convert_sync_batchnorm(copy.deepcopy(alone))
    x = torch.randn(11, 2, dtype=torch.float64)

    def penalties(model, given):
        (slope,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        (slope.norm(2, dim=1) - 1).square().mean().backward()
        return [given.grad, *(each.grad for each in model.parameters())]

    expected = penalties(alone, x.clone().requires_grad_())
    found = penalties(DataParallel(net, cpu(ranks)), x.clone().requires_grad_())
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_converting_keeps_what_the_layer_has():
    layer, seen = nn.BatchNorm1d(3), []
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}more": 1}))
    layer.mine = "a name"
    net = convert_sync_batchnorm(nn.Sequential(layer))
    assert net.state_dict()["0.more"] == 1
    assert net[0].mine == "a name"
    net(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert seen == ["backward"]


class Active(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize(
    ("layer", "error", "why"),
    [
        (Active(2), TypeError, "Active has a forward of its own"),
        (nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(2), dim=None), TypeError, "has parametrizations"),
        (nn.LazyBatchNorm1d(), ValueError, "run a forward before"),
    ],
    ids=["forward", "parametrized", "lazy"],
)
def test_layers_that_cannot_be_converted(layer, error, why):
    net = nn.Sequential(nn.BatchNorm1d(2), layer)
    with pytest.raises(error, match=why):
        convert_sync_batchnorm(net)
    assert type(net[0]) is nn.BatchNorm1d
    assert net[1] is layer


@pytest.mark.parametrize("settings", [{}, {"affine": False}])
def test_another_number_of_channels(ranks, settings):
    net = SyncBatchNorm(3, **settings)
    with pytest.raises(ValueError, match=r"expected 3 channels in dimension 1.* got 1 in an input of shape"):
        DataParallel(net, cpu(ranks))(torch.randn(8, 1))
    assert not net.running_mean.any()


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_grad_mode_has_no_graph_whoever_comes_last(without, last):
    came = threading.Event()

    class Rank(nn.Module):
        def __init__(self, norm, rank):
            super().__init__()
            self.norm, self.rank = norm, rank

        def forward(self, x):
            if self.rank != last:
                came.set()
            else:
                assert came.wait(60)
            with torch.set_grad_enabled(self.rank != without):
                return self.norm(x)

    team = [torch.device(each) for each in cpu(2)]
    alone = nn.BatchNorm1d(3, device="cpu").double()
    layers = [SyncBatchNorm(3, device=each).double() for each in team]
    layers[1].number = layers[0].number  # as copies of one layer have it
    parts = [torch.randn(4, 3, dtype=torch.float64, device=each, requires_grad=True) for each in team]
    outputs = parallel_apply([Rank(layers[0], 0), Rank(layers[1], 1)], parts, devices=team)
    assert [each.requires_grad for each in outputs] == [rank != without for rank in range(2)]
    expected = [each.detach().cpu().requires_grad_() for each in parts]
    whole = alone(torch.cat(expected)).split(4)
    for made, sides in ((outputs, parts), (whole, expected)):
        (made[1 - without] ** 3).sum().backward(inputs=sides[1 - without : 2 - without])
    assert all(torch.allclose(a.cpu(), b) for a, b in zip(outputs, whole, strict=True))
    assert torch.allclose(parts[1 - without].grad.cpu(), expected[1 - without].grad)


def test_a_layer_that_runs_in_a_hook_of_a_backward():
    net = SyncBatchNorm(2)
    x = torch.randn(6, 2, requires_grad=True)
    out = DataParallel(net, cpu(2))(x)
    shapes = []
    out.register_hook(lambda _: shapes.append(net(x.detach()).shape))
    out.sum().backward()
    assert shapes == [(6, 2)]


def test_a_failure_where_ranks_meet_leaves_no_memory(monkeypatch):
    def fails(*_):
        raise ArithmeticError("in the node")

    def failed_forwards():
        for _ in range(3):
            with pytest.raises(ArithmeticError, match="in the node"):
                model(torch.randn(9, 2))
        wake_workers()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    monkeypatch.setattr("mgpu_core.parallel.sync_batchnorm.joint.all_reduce", fails)
    model = DataParallel(nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2)), cpu(3))
    with no_collector():
        assert failed_forwards() == failed_forwards()


@pytest.mark.parametrize("compiled", [compiled_root, compiled_in_place])
@pytest.mark.several_ranks
def test_ranks_that_compile_meet_all_the_same(monkeypatch, ranks, compiled):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "60")
    alone, net = nets()
    model = DataParallel(compiled(net), cpu(ranks))
    for seed in range(3):
        x, y = data(seed=seed)
        mse(model(x), y).backward()
        mse(alone(x), y).backward()
    for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-10)
    same(net, alone)


@pytest.mark.several_ranks
def test_a_step_of_a_compiled_net_meets_too(monkeypatch, ranks):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "60")
    alone, net = nets()
    optimizer = SGD(alone.parameters(), lr=0.1)
    step = TrainStep(compiled_in_place(net), mse, SGD(net.parameters(), lr=0.1), cpu(ranks))
    for seed in range(3):
        x, y = data(seed=seed)
        step(x, y)
        optimizer.zero_grad()
        mse(alone(x), y).backward()
        optimizer.step()
    same(net, alone)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = SyncBatchNorm(2)

    def forward(self, x):
        if bool((x == 99).any()):
            raise KeyError("before it arrives")
        return self.norm(x)


@pytest.mark.several_ranks
def test_a_rank_that_fails_before_it_arrives(ranks):
    net = Failing()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(ranks))
    x, y = torch.randn(16, 2), torch.randn(16, 2)
    x[-1] = 99
    for call in (lambda: DataParallel(net, cpu(ranks))(x), lambda: step(x, y)):
        with pytest.raises(KeyError, match=f"in replica {ranks - 1} ") as caught:
            call()
        assert not getattr(caught.value, "__notes__", []), "the others' waiting is no failure of theirs"
    x[-1] = 1
    step(x, y)


def test_a_rank_that_leaves_the_layer_out():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = SyncBatchNorm(2)

        def forward(self, x):
            return x if bool((x == 99).any()) else self.norm(x)

    x = torch.randn(4, 2)
    x[-1] = 99
    with pytest.raises(mgpu_core.Error, match="rank 1 ended without coming to a layer where all ranks meet"):
        DataParallel(Picky(), cpu(2))(x)


def test_a_rank_that_does_not_come(monkeypatch):
    import threading

    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.5")
    held = threading.Event()

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = SyncBatchNorm(2)

        def forward(self, x):
            if bool((x == 99).any()):
                held.wait(5)
            return self.norm(x)

    x = torch.randn(4, 2)
    x[-1] = 99
    with pytest.raises(mgpu_core.Error, match=r"within 0\.5 s"):
        DataParallel(Late(), cpu(2))(x)
    held.set()


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint_it_is_refused(reentrant):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(2, 2), SyncBatchNorm(2)

        def forward(self, x):
            return checkpoint(self.norm, self.first(x), use_reentrant=reentrant)

    net = Saving()
    out = DataParallel(net, cpu(2))(torch.randn(8, 2))
    with pytest.raises(RuntimeError, match="inside a checkpoint"):
        out.sum().backward()
    out = net(torch.randn(8, 2))  # alone it is the plain layer
    out.sum().backward()


def test_one_value_per_channel():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        mgpu_core.parallel_apply([SyncBatchNorm(2)] * 2, [torch.zeros(1, 2), torch.zeros(0, 2)], devices=cpu(2))


@pytest.mark.several_ranks
def test_half_precision_is_added_up_in_float32(ranks):
    net = SyncBatchNorm(2).bfloat16()
    x = torch.randn(12, 2).bfloat16()
    out = DataParallel(net, cpu(ranks))(x)
    wanted = nn.BatchNorm1d(2)(x.float())
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), wanted, atol=0.02)


def test_with_dropout_and_wrapped_modules():
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), SyncBatchNorm(4), nn.Linear(4, 2))
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        twin = copy.deepcopy(net)
        step = TrainStep(twin, mse, SGD(twin.parameters(), lr=0.1), cpu(3))
        for _ in range(3):
            step(torch.ones(9, 2), torch.zeros(9, 2))
        found.append(twin[3].weight.detach().clone())
    assert torch.equal(*found)
