"""Forward and backward where hooks, graphs, modules and inputs do more than they seem to."""

import copy
import threading
from functools import partial

import numpy as np
import pytest
import torch
from fakes.nets import cpu
from step.nets import Linear, batches, mse
from torch import nn
from torch.optim import SGD

from mgpu_core import Replicate, TrainStep, optim
from mgpu_core.ranks.rank_clock import RankClock


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_in_a_window_does_no_harm(ranks, to_none):
    torch.manual_seed(0)
    net, alone = Linear().double(), Linear().double()
    optimizer = SGD(net.parameters(), lr=0.1)
    step = TrainStep(net, mse, optimizer, cpu(ranks), accumulate=2)
    data = list(batches(2, [6, 6], columns=3))
    for x, y in data:
        optimizer.zero_grad(set_to_none=to_none)
        step(x, y)
    mse(alone(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).backward()
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)


class Collector:
    def __init__(self):
        self.rows, self.lock = 0, threading.Lock()

    def hook(self, module, args, output):
        with self.lock:
            self.rows += len(output)

    __call__ = hook


@pytest.mark.parametrize("way", ["method", "object", "partial"])
def test_a_hook_of_somebody_elses_sees_all_ranks(ranks, way):
    collector, net = Collector(), Linear()
    hooks = {"method": collector.hook, "object": collector, "partial": partial(Collector.hook, collector)}
    net.last.register_forward_hook(hooks[way])
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(ranks))
    step(torch.ones(8, 3), torch.ones(8, 2))
    assert collector.rows == 8


def test_a_frozen_parameter_with_a_hook():
    net = Linear()
    net.last.weight.register_hook(lambda grad: grad * 2)
    net.last.weight.requires_grad_(False)
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    step(torch.ones(4, 3), torch.zeros(4, 2))
    assert net.last.weight.grad is None


def test_a_mean_without_rows(ranks):
    net, alone = Linear(), Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.0), cpu(ranks))
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    loss = step(Replicate(x), Replicate(y))
    wanted = mse(alone(x), y)
    wanted.backward()
    assert torch.allclose(loss, wanted.detach())
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)


def test_weights_beyond_half_precision():
    net = nn.Linear(2, 2, bias=False).half()
    nn.init.ones_(net.weight)
    step = TrainStep(
        net, lambda o, y: (o.sum(), y.numel() * 50_000), SGD(net.parameters(), lr=0.0), cpu(2), reduction="weighted"
    )
    loss = step(torch.ones(4, 2).half() * 4, torch.ones(4))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(4 * 2 * 2 * 4 / 200_000, rel=1e-2)


def test_inputs_with_a_graph_of_the_callers(ranks):
    torch.manual_seed(0)
    encoder, net = nn.Linear(3, 3).double(), Linear().double()
    other, alone = copy.deepcopy(encoder), copy.deepcopy(net)
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(ranks))
    ((x, y),) = batches(1, 6, columns=3)
    step(encoder(x), y)
    mse(alone(other(x)), y).backward()
    assert torch.allclose(encoder.weight.grad, other.weight.grad)
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)


def test_expanded_buffers_do_not_hide_a_failure():
    class Net(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("wide", torch.zeros(1).expand(4))

        def forward(self, x):
            raise KeyError("mine")

    net = Net()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(1))
    with pytest.raises(KeyError, match="mine"):
        step(torch.ones(4, 3), torch.zeros(4, 2))


def test_a_clock_that_was_not_stopped_says_nothing():
    clock = RankClock(torch.device("cpu"))
    assert clock.seconds() is None
    with clock.running():
        assert clock.seconds() is None
    assert clock.seconds() > 0


def test_shares_survive_a_failure_and_few_rows():
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), shares="auto")
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    step(x, y)
    with pytest.raises(RuntimeError):
        step(x[:, :2], y)
    step(x[:1], y[:1])
    for _ in range(12):
        step(x, y)
    assert sum(each.share for each in step.plan()) == pytest.approx(1)


@pytest.mark.parametrize(("nbytes", "hooked"), [(10_000, False), (1, True)])
def test_backward_stops_for_python_only_where_there_are_buckets_to_send_early(nbytes, hooked):
    net = Linear()
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=1.0), cpu(2), bucket_nbytes=nbytes)
    for _ in range(2):
        step(torch.ones(4, 3), torch.ones(4, 2))
        net.last.bias.requires_grad_(not net.last.bias.requires_grad)  # frozen and thawed
        hooks = [bool(each._post_accumulate_grad_hooks) for each in net.parameters()]
        assert hooks == [hooked, hooked]


class InPlace(nn.Module):
    """Writes into its input, as a normalisation of images may."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))

    def forward(self, x):
        return self.net(x.sub_(0.5).div_(2))


def test_modules_that_write_into_their_input(ranks):
    net = InPlace()
    alone = copy.deepcopy(net)
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.0), cpu(ranks))
    x = torch.randn(16, 3)
    wanted = mse(alone(x.clone()), torch.zeros(16, 2))
    for _ in range(50):  # the ranks write at once
        assert torch.allclose(step(x.clone(), torch.zeros(16, 2)), wanted)


def test_a_target_that_is_no_tensor_goes_to_every_rank(ranks):
    net = Linear()
    target = np.zeros((2, 3))
    seen = []
    step = TrainStep(net, lambda output, given: (seen.append(given), output.sum())[1], SGD(net.parameters(), lr=0.0),
                     cpu(ranks))  # fmt: skip
    for _ in range(2):  # the first call is checked, by calls of the loss on all rows
        seen.clear()
        step(torch.ones(8, 3), target)
    assert len(seen) == ranks
    assert all(each is target for each in seen)


def test_a_hook_changes_between_updates():
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), accumulate=2)
    step(torch.ones(4, 3), torch.zeros(4, 2))
    with pytest.raises(RuntimeError, match="between updates"):
        step.register_comm_hook(print)


def test_a_left_over_backward_is_torchs_error():
    net = Linear()
    step = TrainStep(net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(2))
    with pytest.raises(RuntimeError, match="does not require grad"):
        step(torch.ones(4, 3), torch.ones(4, 2)).backward()
