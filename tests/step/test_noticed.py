"""What the user changes in net and optimizer, or keeps there besides: followed, or refused by name."""

import pytest
import torch
from fakes.nets import cpu
from fakes.traces import is_fused, traced
from step.nets import Pair, batches, mse, two_layers
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import mgpu_core
from mgpu_core import TrainStep


def sgd(parameters):
    return SGD(parameters, lr=0.05, momentum=0.9, dampening=0.5)


class HooksItself(nn.Module):
    """Puts a hook on its weight in each forward, instead of the last one."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2).double()
        self.handle = self.last.weight.register_hook(lambda gradient: gradient)

    def forward(self, x):
        self.handle.remove()
        self.handle = self.last.weight.register_hook(lambda gradient: gradient * 2)
        return self.last(x)

    def __deepcopy__(self, memo):
        made = HooksItself()
        made.last.load_state_dict(self.last.state_dict())
        return made


@pytest.mark.parametrize("ranks", [1])
def test_a_forward_may_renew_a_hook(ranks):
    pair = Pair(HooksItself(), sgd, ranks)
    for x, y in batches(4, 9):
        pair.both(x, y)
    assert pair.far() < 1e-12


def test_a_rebuild_that_fails_leaves_the_step_as_it_was(ranks):
    pair = Pair(two_layers(), sgd, ranks)
    for i, (x, y) in enumerate(batches(5, 9)):
        if i == 2:
            pair.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            with pytest.raises(ValueError, match="group 1, of shape"):
                pair.step.rebuild()
            del pair.optimizer.param_groups[1]
        pair.both(x, y)
    assert pair.far() < 1e-12
    assert pair.step.steps == 5


def test_a_scheduler_replaces_no_step():
    net = two_layers()
    optimizer = mgpu_core.optim.SGD(net.parameters(), lr=0.1)
    StepLR(optimizer, 1)
    assert "step" in vars(optimizer)
    step = TrainStep(net, mse, optimizer, cpu(2))
    (x, y), *_ = batches(1, 9)
    assert is_fused(traced(lambda: step(x, y)), "sgd")


@pytest.mark.several_ranks
def test_a_rank_whose_loss_is_constant_adds_nothing(ranks):
    def positives(output, target):
        mask = target[:, 0] > 0
        return (output[mask] - target[mask]).square().sum() if mask.any() else output.new_zeros(())

    pair = Pair(two_layers(), sgd, ranks, loss_fn=positives, reduction="sum")
    for i, (x, y) in enumerate(batches(4, 16)):
        y[:, 0] = 1
        y[8:, 0] = -1
        if i == 2:
            y[:, 0] = -1
            with pytest.raises(RuntimeError, match="there is nothing to train"):
                pair.step(x, y)
        else:
            pair.both(x, y)
    assert pair.far() < 1e-12


class Buffered(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.last = nn.Linear(4, 4).double()
        self.register_buffer("a", buffer)
        self.register_buffer("b", buffer)

    def forward(self, x):
        a, b = (each.to_dense() if each.layout is not torch.strided else each for each in (self.a, self.b))
        return self.last(x @ a + x @ b.t())


EYE = torch.eye(4).double()


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (lambda: EYE.clone(), lambda: EYE * 3),
        (lambda: EYE.to_sparse_csr(), lambda: torch.ones(4, 4).double().to_sparse_csr()),
        (lambda: EYE.clone(), lambda: EYE.to_sparse()),
        (lambda: EYE.to_sparse(), lambda: EYE * 2),
        (lambda: EYE.to_sparse(), lambda: EYE.to_sparse_csr()),
    ],
    ids=["two of one", "more in it", "coo", "dense", "csr"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_buffers_become_others(first, later):
    pair = Pair(Buffered(EYE), sgd, 2)
    for i, (x, y) in enumerate(batches(6, 9, classes=4)):
        if i == 1:
            pair.net.a = pair.alone.a = pair.net.b = pair.alone.b = first()
        if i == 3:
            pair.net.b = pair.alone.b = later()
        pair.both(x, y)
    assert pair.far() < 1e-12


def test_an_evaluation_in_inference_mode_leaves_buffers_that_can_be_written():
    pair = Pair(Buffered(EYE), sgd, 2)
    (x, y), *_ = batches(1, 9, classes=4)
    pair.both(x, y)
    pair.net.a = pair.alone.a = EYE[:, :, None].squeeze(-1) * 2
    pair.net.register_buffer("c", torch.ones(2))
    with torch.inference_mode():
        pair.step.evaluate(x, y)
    pair.both(x, y)
    assert pair.far() < 1e-12
    assert not pair.net.c.is_inference()


class Hidden(nn.Module):
    """Shows its head's parameters alone."""

    def __init__(self, ways):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
        self.ways = ways

    def forward(self, x):
        return self.head(self.body(x))

    def named_parameters(self, *args, **kwargs):
        found = super().named_parameters(*args, **kwargs)
        return ((name, each) for name, each in found if name.startswith("head") or "names" not in self.ways)

    def parameters(self, recurse=True):
        return self.head.parameters() if "parameters" in self.ways else super().parameters(recurse)


@pytest.mark.parametrize("ways", [("names",), ("parameters",), ("names", "parameters")])
def test_a_class_may_show_some_of_its_parameters(ways, ranks):
    torch.manual_seed(0)
    pair = Pair(Hidden(ways), sgd, ranks)
    for x, y in batches(4, 9):
        pair.both(x, y)
    assert pair.far() < 1e-12


def test_weights_that_torch_keeps_for_a_while_are_all_ranks(ranks):
    net = two_layers()
    nn.utils.parametrizations.weight_norm(net[0])
    alone = two_layers()
    nn.utils.parametrizations.weight_norm(alone[0])
    alone.load_state_dict(net.state_dict())
    optimizer, reference = sgd(net.parameters()), sgd(alone.parameters())
    step = TrainStep(net, mse, optimizer, cpu(ranks))
    for x, y in batches(4, 16):
        with nn.utils.parametrize.cached():
            step(x, y)
        reference.zero_grad()
        mse(alone(x), y).backward()
        reference.step()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(net.parameters(), alone.parameters(), strict=True))
