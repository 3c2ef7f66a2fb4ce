"""Modules of all sorts in a TrainStep: compiled, scripted, drawing random numbers, under autocast, with hooks."""

import copy
import gc
import warnings

import pytest
import torch
from fakes.nets import Cnn, Lstm, Tied, Transformer, cpu
from step.nets import Branches, Linear, Pair, batches, compiled_in_place, compiled_root, mse
from torch import nn
from torch.optim import SGD, AdamW

from mgpu_core import TrainStep
from mgpu_core.step import checkpoint

NETS = {
    "lstm": (Lstm, lambda g: torch.randn(6, 5, 4, generator=g)),
    "transformer": (Transformer, lambda g: torch.randint(7, (6, 5), generator=g)),
    "tied": (Tied, lambda g: torch.randint(7, (6, 5), generator=g)),
    "cnn": (Cnn, lambda g: torch.randn(6, 1, 4, 4, generator=g)),
}


@pytest.mark.parametrize("name", NETS)
def test_nets_train_as_alone(name, ranks):
    make, draw = NETS[name]
    torch.manual_seed(0)
    net = make().double()
    if name == "cnn":
        net.norm.eval()  # its statistics are those of a rank's own rows
    pair = Pair(net, lambda p: AdamW(p, lr=0.01), ranks)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = draw(generator)
        x = x.double() if x.is_floating_point() else x
        pair.both(x, torch.ones(6, 7 if name == "tied" else 3, dtype=torch.float64))
    assert pair.far() < 1e-9


def compiled_inside(net):
    net.first.compile(backend="eager")
    net.second = torch.compile(net.second, backend="eager")
    return net


@pytest.mark.parametrize("way", [compiled_root, compiled_in_place, compiled_inside])
def test_compiled_modules(way, ranks):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), lambda p: SGD(p, lr=0.1), ranks, compiled=way)
    for x, y in batches(4, 9):
        pair.both(x, 2, y)
    assert pair.far() < 1e-12
    pair.step.close()


def test_scripts(ranks):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    pair = Pair(net, lambda p: SGD(p, lr=0.1), ranks, compiled=torch.jit.script)
    for x, y in batches(4, 9):
        pair.both(x, y)
    assert pair.far() < 1e-12


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 2)

    def forward(self, x):
        return self.last(self.drop(self.first(x)))


def test_one_seed_one_result(ranks):
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        net = Dropping()
        step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1, momentum=0.9), cpu(ranks))
        for x, y in batches(5, 16, dtype=torch.float32):
            step(x, y)
        found.append(net.last.weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_dropout_resumed_gives_the_same_bits(ranks):
    torch.manual_seed(0)
    net = Dropping()
    step = TrainStep(net, mse, AdamW(net.parameters()), cpu(ranks))
    data = list(batches(6, 16, dtype=torch.float32))
    for x, y in data[:3]:
        step(x, y)
    state = step.state_dict()
    for x, y in data[3:]:
        step(x, y)
    wanted = net.last.weight.detach().clone()
    other = Dropping()
    torch.manual_seed(5)
    resumed = TrainStep(other, mse, AdamW(other.parameters()), cpu(ranks))
    resumed.load_state_dict(state)
    for x, y in data[3:]:
        resumed(x, y)
    assert torch.equal(other.last.weight, wanted)


def test_autocast_reaches_forward_and_loss_but_not_backward(ranks):
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", torch.is_autocast_enabled("cpu"), x.dtype))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(("backward", torch.is_autocast_enabled("cpu"), grad.dtype))
            return grad

    class Net(Linear):
        def forward(self, x):
            return Watch.apply(super().forward(x))

    net = Net()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(ranks))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(torch.ones(8, 3), torch.zeros(8, 2))
    assert seen.count(("forward", True, torch.bfloat16)) == ranks
    assert seen.count(("backward", False, torch.bfloat16)) == ranks
    assert net.last.weight.grad.dtype == torch.float32


def test_post_accumulate_hooks_are_refused():
    net = Linear()
    net.last.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"last\.weight has a post-accumulate hook"):
        TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))


def test_losses_that_are_modules_go_to_the_ranks():
    net = nn.Linear(4, 3)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), reduction="sum")
    alone = copy.deepcopy(net)
    step = TrainStep(net, loss_fn, SGD(net.parameters(), lr=0.1), cpu(2), reduction="sum")
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    step(x, y)
    loss_fn(alone(x), y).backward()
    assert torch.allclose(net.weight.grad, alone.weight.grad, atol=1e-6)


def test_attributes_that_deepcopy_refuses_but_a_forward_remakes():
    net = nn.utils.weight_norm(nn.Linear(4, 2))  # keeps a tensor with a graph as an attribute
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    before = net.weight_v.detach().clone()
    step(torch.ones(4, 4), torch.zeros(4, 2))
    assert not torch.equal(before, net.weight_v)
    step.check_replicas()


def test_nothing_is_left_behind(ranks):
    def live():
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
        return sum(each.nbytes for each in found if each.layout is torch.strided)  # not other tests' sparse ones

    net = Dropping()
    step = TrainStep(net, mse, AdamW(net.parameters()), cpu(ranks))
    x, y = torch.ones(8, 4), torch.zeros(8, 2)
    for _ in range(3):
        step(x, y)
    before = live()
    for _ in range(20):
        step(x, y)
    assert live() <= before  # what other tests have left may go meanwhile


def test_parameters_that_have_no_gradients(ranks):
    """Whole numbers, as quantized weights are: no bucket has them, and no fused kernel minds them."""
    net = Linear()
    net.scale = nn.Parameter(torch.tensor([2, 3], dtype=torch.int8), requires_grad=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    step = TrainStep(net, lambda output, target: (output * target).sum(), optimizer, cpu(ranks), reduction="sum")
    wanted = net.last.weight.detach() - torch.full((2, 3), 8.0)
    with warnings.catch_warnings(action="error"):
        step(torch.ones(8, 3), torch.ones(8, 2))
    assert torch.equal(net.last.weight.detach(), wanted)
    assert net.scale.tolist() == [2, 3]
    step.check_replicas()


def test_a_state_holds_the_random_numbers_of_all_accelerators(monkeypatch):
    gpus = [torch.device("cuda", index) for index in range(2)]
    states = dict(zip(gpus, torch.tensor([[5], [6]]), strict=True))
    monkeypatch.setattr(checkpoint, "accelerators", lambda: gpus)
    monkeypatch.setattr(checkpoint, "numbers_of", lambda devices: {gpu: states[gpu] for gpu in devices})
    monkeypatch.setattr(checkpoint, "put_numbers_back", states.update)
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    kept = step.state_dict()
    states.update(dict.fromkeys(gpus, None))
    step.load_state_dict(kept)
    assert [state.tolist() for state in states.values()] == [[5], [6]]
