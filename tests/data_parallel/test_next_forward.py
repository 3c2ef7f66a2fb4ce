"""Every change of the module and the devices reaches the next forward pass; what replicas assign is lost."""

import warnings

import pytest
import torch
from fakes.nets import Cnn, Spy, chunks, cpu
from fakes.tensors import numbers
from fakes.wrapper import Lambda
from torch import nn
from torch.nn.utils import parametrizations, prune

from mgpu_core import DataParallel


@pytest.mark.parametrize("grad", [True, False])
def test_rank_0_writes_the_wrapped_modules_buffers(ranks, grad):
    net = Lambda(lambda self, x: self.sum.add_(x[:, 0].sum()) * 0 + x.sum(1))
    net.register_buffer("sum", torch.zeros(1))
    pointer = net.sum.data_ptr()
    x = numbers(9, 2)
    with torch.set_grad_enabled(grad):
        DataParallel(net, cpu(ranks))(x)
    assert net.sum.item() == x[: chunks(9, ranks)[0], 0].sum().item()
    assert net.sum.data_ptr() == pointer


def test_buffers_can_be_trained_on_after_a_forward_in_inference_mode(ranks):
    net = Cnn()
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(16, 1, 4, 4)
    with torch.inference_mode():
        wrapper(x)
    assert not any(tensor.is_inference() for tensor in net.state_dict().values())
    wrapper(x).sum().backward()
    assert net.norm.num_batches_tracked.item() == 2


def test_close_and_go_on(ranks):
    spy = Spy()
    wrapper = DataParallel(spy, cpu(ranks))
    x = torch.arange(8.0).repeat(2, 1).t()
    one = wrapper(x)
    wrapper.close()
    wrapper.close()
    assert torch.equal(wrapper(x), one)


def test_the_ranks_follow_device_ids():
    """People change the attribute: in place or by another list."""
    model = DataParallel(nn.Linear(2, 1), cpu(2))
    seen = []
    model.module.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    model(torch.ones(6, 2))
    model.device_ids.append(model.device_ids[0])
    model(torch.ones(6, 2))
    model.device_ids = cpu(1)
    model(torch.ones(6, 2))
    assert seen == [3, 3, 2, 2, 2, 6]


def warnings_of(wrapper, columns):
    """Return the texts of all warnings in four forward passes."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(4):
            wrapper(numbers(8, columns))
    return [str(each.message) for each in caught]


@pytest.mark.several_ranks
def test_attributes_assigned_in_forward_are_lost_with_one_warning(ranks):
    def count(self, x):
        self.count += 1
        return self.linear(x)

    net = Lambda(count, count=0)
    wrapper = DataParallel(net, cpu(ranks))
    assert len([each for each in warnings_of(wrapper, 2) if "count" in each]) == 1
    assert net.count == 0


@pytest.mark.several_ranks
def test_buffers_assigned_anew_in_forward_are_lost_with_one_warning(ranks):
    # The usual mistake: a running mean that is replaced instead of changed in place.
    def average(self, x):
        self.mean = self.mean * 0.5 + x.sum() * 0.5
        return self.linear(x)

    net = Lambda(average)
    net.register_buffer("mean", torch.zeros(()))
    wrapper = DataParallel(net, cpu(ranks))
    assert len([each for each in warnings_of(wrapper, 2) if "mean" in each]) == 1
    assert net.mean.item() == 0


SILENT = {
    "weight_norm": lambda: torch.nn.utils.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
    "parametrization": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "wrapper": lambda: nn.Sequential(DataParallel(nn.Linear(4, 4), cpu(2))),
    "script": lambda: torch.jit.script(nn.Linear(4, 4)),
    "temporary": lambda: Lambda(temporary),
}


def temporary(self, x):
    self.kept = x
    del self.kept
    return x


@pytest.mark.cpu_only("a wrapper in a wrapper names the first device of the outer one, whose other ranks are elsewhere")
@pytest.mark.parametrize("kind", SILENT)
def test_nothing_is_warned_of_where_nothing_is_lost(kind):
    with warnings.catch_warnings(action="ignore"):
        net = SILENT[kind]()
    wrapper = DataParallel(net, cpu(2))
    assert [each for each in warnings_of(wrapper, 4) if "lost" in each] == []
