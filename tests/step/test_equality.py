"""Over many steps, any number of ranks trains what one device trains."""

import pytest
import torch
from step.nets import Branches, Complex, Pair, TwoDtypes, batches, here
from torch import nn

from mgpu_core.optim import SGD, Adam, AdamW

OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.05, weight_decay=0.01),
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
}
EVEN, RAGGED = [24], [24, 7, 1, 13]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_200_steps_with_changing_unused_parameters(name, ranks, rows):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), OPTIMIZERS[name], ranks)
    for i, (x, y) in enumerate(batches(200, rows)):
        loss, wanted = pair.both(x, i // 4 % 3, y)  # the same ones for a while, then others
        assert abs(loss - wanted) < 1e-9, f"step {i}"
        assert pair.same_gradients(), f"step {i}"
    assert pair.far() < 1e-9
    assert pair.same_state()
    assert pair.net.rare.weight.grad is None
    assert pair.optimizer.flat is not None
    pair.step.check_replicas()


def test_other_optimizers_run_their_own_step(ranks):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.5), ranks)
    for i, (x, y) in enumerate(batches(30, RAGGED)):
        pair.both(x, i % 3, y)
    assert pair.far() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, ranks):
    """Half precision adds the ranks in float32 and rounds once: closer to the truth than one device's own sums."""
    torch.manual_seed(0)
    pair = Pair(Branches().to(dtype), lambda p: SGD(p, lr=0.01, momentum=0.9), ranks)
    for x, y in batches(20, EVEN, dtype=dtype):
        pair.both(x, 2, y)
    assert pair.far() < {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]


def test_parameters_of_two_dtypes(ranks):
    torch.manual_seed(0)
    pair = Pair(TwoDtypes(), lambda p: AdamW(p, lr=0.01), ranks)
    for x, y in batches(20, EVEN):
        pair.both(x, y)
    assert pair.far() < 1e-5
    assert pair.optimizer.flat is not None


def test_tied_parameters_and_channels_last(ranks):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    net = Net().double().to(memory_format=torch.channels_last)
    strides = net.one.weight.stride()
    pair = Pair(net, lambda p: SGD(p, lr=0.05, momentum=0.9), ranks)
    for i in range(10):
        generator = torch.Generator("cpu").manual_seed(i)
        x = here(torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64, device="cpu"))
        pair.both(x, x.flip(0))
    assert pair.far() < 1e-9
    assert net.one.weight is net.two.weight
    assert net.one.weight.stride() == net.one.weight.grad.stride() == strides


def test_sparse_gradients_take_torchs_optimizer(ranks):
    torch.manual_seed(0)
    net = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), nn.Linear(4, 2))
    pair = Pair(net, lambda p: torch.optim.SGD(p, lr=0.1), ranks)
    bags = [here(torch.randint(10, (6, 3), device="cpu")) for _ in range(5)]
    for bag in bags:
        pair.both(bag, torch.ones(6, 2))
    assert pair.far() < 1e-6
    assert net[0].weight.grad.is_sparse
    ours, before = Pair(net, lambda p: SGD(p, lr=0.1), ranks), net[1].weight.clone()
    with pytest.raises(TypeError, match=r"sparse.*torch\.optim\.SparseAdam"):
        ours.step(bags[0], torch.ones(6, 2))
    assert torch.equal(net[1].weight, before)
    assert ours.step.steps == 0


def test_complex_parameters_take_torchs_optimizer(ranks):
    torch.manual_seed(0)

    pair = Pair(Complex(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ranks)
    for x, y in batches(10, EVEN):
        pair.both(x, y)
    assert pair.far() < 1e-9
    ours = Pair(Complex(), lambda p: SGD(p, lr=0.1), ranks)
    with pytest.raises(TypeError, match=r"not torch\.complex128: use torch\.optim's"):
        ours.step(*next(batches(1, EVEN)))
