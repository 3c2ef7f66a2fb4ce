"""The module's own code runs, whatever it does: losses and gradients are those of micro-batches one after the other."""

import copy
import warnings

import pytest
import torch
from fakes.nets import cpu
from pipeline.own_code import NETS, Attribute, Block, Plain
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_core import Pipeline, Replicate, TrainStep

POINTS = {2: ["blocks.2"], 3: ["blocks.1", "blocks.3"]}
ROWS = 12

pytestmark = [
    pytest.mark.filterwarnings("ignore:the forward of"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]


def loss_fn(output, target):
    output = sum(output) if isinstance(output, tuple) else output
    return (output - target.to(output.device)).square().mean()


def batch(first):
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, ROWS, 8, dtype=torch.float64, generator=generator, device="cpu")
    return x.to(first), target.to(first)


def pair(kind, stages, **options):
    """A pipeline of such a net, and the same net in one piece."""
    torch.manual_seed(0)
    net = kind()
    torch.manual_seed(0)
    whole = kind().to(cpu(1)[0])
    return Pipeline(net, cpu(stages), split_points=POINTS[stages], **options), whole


def assert_same_gradients(net, whole):
    for (name, own), wanted in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert (own.grad is None) == (wanted.grad is None), name
        if own.grad is not None:
            assert torch.allclose(own.grad.cpu(), wanted.grad.cpu(), rtol=0, atol=1e-12), name


def train(whole, x, target, chunks):
    """The loss of micro-batches, one after the other."""
    total = 0.0
    for part, wanted in zip(x.tensor_split(chunks), target.tensor_split(chunks), strict=True):
        loss = loss_fn(whole(part.clone()), wanted) * len(part) / len(x)
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.parametrize("chunks", [1, 3, 4])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize(("schedule", "workers"), [("1f1b", "threads"), ("gpipe", "threads"), ("1f1b", "caller")])
def test_a_step_is_that_of_micro_batches_one_after_the_other(kind, stages, chunks, schedule, workers):
    net, whole = pair(kind, stages, chunks=chunks, schedule=schedule)
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.0), workers=workers)
    x, target = batch(net.device_ids[0])
    for _ in range(2):
        whole.zero_grad()
        assert float(step(x.clone(), target)) == pytest.approx(train(whole, x, target, chunks), abs=1e-12)
        assert_same_gradients(net, whole)


@pytest.mark.parametrize("kind", NETS)
def test_a_loop_of_ones_own_is_that_of_the_whole_batch(kind):
    net, whole = pair(kind, 3, chunks=3)
    x, target = batch(net.device_ids[0])
    loss_fn(net(x.clone()), target).backward()
    train(whole, x, target, 3)
    assert_same_gradients(net, whole)
    with torch.no_grad():
        assert torch.allclose(sum_of(net(x.clone())).cpu(), sum_of(whole(x.clone())).cpu())


def sum_of(output):
    return sum(output) if isinstance(output, tuple) else output


WITHOUT_STATE = [kind for kind in NETS if kind.__name__ not in ("InPlaceFirst", "CacheObject")]


@pytest.mark.parametrize("kind", WITHOUT_STATE)
def test_layers_that_run_again_have_the_same_gradients(kind):
    net, whole = pair(kind, 3, chunks=3, checkpoint="except_last")
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.0), workers="threads")
    x, target = batch(net.device_ids[0])
    assert float(step(x.clone(), target)) == pytest.approx(train(whole, x, target, 3), abs=1e-12)
    assert_same_gradients(net, whole)


class Reversed(Plain):
    """Called in another order than defined."""

    def forward(self, x):
        for index in (2, 3, 0, 1):
            x = self.blocks[index](x)
        return x


def test_the_first_call_shows_the_order_of_the_calls():
    torch.manual_seed(0)
    net = Reversed()
    whole = copy.deepcopy(net).to(cpu(1)[0])
    before = [id(each) for each in net.parameters()]
    pipe = Pipeline(net, cpu(2), chunks=3)
    assert pipe.split_points == ["blocks.2"]
    step = TrainStep(pipe, loss_fn, torch.optim.SGD(net.parameters(), lr=0.0))
    x, target = batch(pipe.device_ids[0])
    assert float(step(x, target)) == pytest.approx(train(whole, x, target, 3), abs=1e-12)
    assert pipe.split_points == ["blocks.0"]
    assert [id(each) for each in net.parameters()] == before
    assert str(net.blocks[2].linear.weight.device) == cpu(2)[0]
    assert str(net.blocks[1].linear.weight.device) == cpu(2)[1]
    assert_same_gradients(net, whole)


def test_names_in_another_order_than_the_calls_are_refused_at_the_first_call():
    pipe = Pipeline(Reversed(), cpu(2), split_points=["blocks.2"], chunks=2)
    with pytest.raises(ValueError, match=r"no layer is called before split point 'blocks\.2'"):
        pipe(batch(pipe.device_ids[0])[0])


class ReentrantAround(Plain):
    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def test_a_reentrant_checkpoint_around_layers_is_refused_by_name():
    net, _ = pair(ReentrantAround, 2)
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        step(*batch(net.device_ids[0]))


class WritesEarly(Plain):
    """The tensor has another name, too, which is read in the next stage."""

    def forward(self, x):
        early = self.blocks[0](x) * 1
        other = early
        y = self.blocks[1](early * 1)
        early += y
        y = self.blocks[2](y + other)
        return self.blocks[3](y + early) + other


class WritesAView(Plain):
    def forward(self, x):
        early = self.blocks[0](x) * 1
        y = self.blocks[1](early * 1)
        early[:, 0] += y[:, 1]
        early.view(-1)[3:5].mul_(2)
        return self.blocks[3](self.blocks[2](y)) + early


class Closing(nn.Module):
    """A block of a residual net, which closes with an addition in place."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Block(), nn.Linear(8, 8, dtype=torch.float64))
        self.down = nn.Sequential(Block())

    def forward(self, x):
        out = self.body(x)
        out += self.down(x)
        return torch.relu_(out)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Closing(), Closing())

    def forward(self, x):
        return self.blocks(x)


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        (WritesEarly, ["blocks.1", "blocks.2"]),
        (WritesEarly, ["blocks.2", "blocks.3"]),
        (WritesAView, ["blocks.1", "blocks.3"]),
        (WritesAView, ["blocks.2"]),
        (Residual, ["blocks.0.body.1", "blocks.0.down.0"]),
        (Residual, ["blocks.0.down.0", "blocks.1.down.0"]),
        (Residual, ["blocks.1"]),
    ],
)
def test_code_between_layers_may_write_a_tensor_of_an_earlier_stage(kind, points):
    torch.manual_seed(0)
    net = kind()
    whole = copy.deepcopy(net).to(cpu(1)[0])
    pipe = Pipeline(net, cpu(len(points) + 1), split_points=points, chunks=3)
    step = TrainStep(pipe, loss_fn, torch.optim.SGD(net.parameters(), lr=0.0))
    x, target = batch(pipe.device_ids[0])
    assert float(step(x, target)) == pytest.approx(train(whole, x, target, 3), abs=1e-12)
    assert_same_gradients(net, whole)


@pytest.mark.filterwarnings("default:the forward of")
def test_attributes_of_the_code_between_layers_are_told_of_once():
    net, _ = pair(Attribute, 2)
    with pytest.warns(UserWarning, match="the forward of Attribute assigns saved"):
        net(batch(net.device_ids[0])[0])
    with warnings.catch_warnings(action="error"):
        net(batch(net.device_ids[0])[0])


class Counting(nn.Module):
    """A layer that keeps something on itself."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x


def test_attributes_of_layers_stay():
    net = Pipeline(nn.Sequential(nn.Linear(8, 8).double(), Counting()), cpu(2), split_points=["1"], chunks=4)
    net(batch(net.device_ids[0])[0])
    assert net.module[1].calls == 4


class Dropping(Plain):
    def __init__(self):
        super().__init__(lambda: nn.Sequential(Block(), nn.Dropout(0.5), Block(), nn.Dropout(0.2)))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_one_seed_gives_one_set_of_bits_also_where_dropout_runs_again(workers):
    torch.manual_seed(0)
    net = Pipeline(Dropping(), cpu(2), split_points=["blocks.2"], chunks=4)
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.0), workers=workers)
    found = []
    for _ in range(5):
        torch.manual_seed(3)
        loss = float(step(*batch(net.device_ids[0])))
        found.append((loss, *(each.grad.sum().item() for each in net.parameters())))
    assert len(set(found)) == 1


def test_twenty_runs_with_tied_weights_have_one_set_of_bits():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    net[4].weight = net[0].weight
    x = torch.randn(64, 64, device=cpu(1)[0])
    pipe = Pipeline(net, cpu(3), split_points=["1", "3"], chunks=8)
    step = TrainStep(pipe, loss_fn, torch.optim.SGD(net.parameters(), lr=0.0), workers="threads")
    bits = set()
    for _ in range(20):
        step(x, x)
        bits.add(net[0].weight.grad.cpu().numpy().tobytes())
    assert len(bits) == 1


def test_replicated_arguments_are_cut_once():
    class Net(Plain):
        def forward(self, x, table):
            return super().forward(x) + table.sum()

    torch.manual_seed(0)
    net = Net()
    whole = copy.deepcopy(net).to(cpu(1)[0])
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=2)
    step = TrainStep(pipe, loss_fn, torch.optim.SGD(net.parameters(), lr=0.0))
    x, target = batch(pipe.device_ids[0])
    table = torch.arange(float(ROWS), dtype=torch.float64, device=x.device)  # as many entries as rows
    wanted = loss_fn(whole(x, table), target)
    assert float(step(x, Replicate(table), target)) == pytest.approx(float(wanted), abs=1e-12)
