"""``DataParallel.call`` runs a method of the module as the forward is run."""

import copy

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import DataParallel


class Writer(nn.Module):
    """Writes for each row as many numbers as it says, at most; the rest of a batch is filled up."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)

    def write(self, lengths, most=9, *, fill=-1.0):
        """Return (rows, longest) numbers, and per row its length."""
        longest = min(most, int(lengths.max()))
        columns = torch.arange(longest, device=lengths.device).expand(len(lengths), -1)
        texts = torch.where(columns < lengths[:, None], columns.double(), fill)
        return {"texts": texts, "lengths": lengths.clamp(max=most)}

    def draw(self, x):
        return torch.rand_like(x)

    def encode(self, x):
        return self(x).tanh()


LENGTHS = torch.tensor([2, 3, 1, 5, 4, 1, 2])


def test_rows_are_cut_and_joined_and_short_outputs_filled_up(ranks):
    net = Writer()
    model, lengths = DataParallel(copy.deepcopy(net).to(cpu(1)[0]), cpu(ranks)), LENGTHS.to(cpu(1)[0])
    wanted = net.write(lengths, 4)
    found = model.call("write", lengths, 4, pad_value=-1)
    assert torch.equal(found["texts"], wanted["texts"])
    assert torch.equal(found["lengths"], wanted["lengths"])
    other = model.call("write", lengths, most=3, fill=0.0, pad_value=0)
    assert torch.equal(other["texts"], net.write(lengths, 3, fill=0.0)["texts"])


def test_unequal_lengths_need_a_value():
    model = DataParallel(Writer().to(cpu(1)[0]), cpu(3))
    with pytest.raises(ValueError, match=r"outputs\['texts'\] has the shapes \(3, 3\), \(2, 5\), .*pad_value"):
        model.call("write", LENGTHS.to(cpu(1)[0]))
    assert model.call("write", LENGTHS.to(cpu(1)[0]), 1)["texts"].shape == (7, 1)


def test_gradients_reach_the_module(ranks):
    net = Writer().double()
    model, alone = DataParallel(copy.deepcopy(net).to(cpu(1)[0]), cpu(ranks)), net.to(cpu(1)[0])
    x = torch.rand(7, 2, dtype=torch.float64, device=cpu(1)[0])
    model.call("encode", x).square().sum().backward()
    alone.encode(x).square().sum().backward()
    for one, other in zip(model.module.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-12)


def test_methods_draw_numbers_of_their_own():
    model, x = DataParallel(Writer().to(cpu(1)[0]), cpu(1) * 3), torch.zeros(6, 5, device=cpu(1)[0])
    torch.manual_seed(0)
    first = model.call("draw", x)
    torch.manual_seed(0)
    assert torch.equal(model.call("draw", x), first)
    assert len(first.unique()) == first.numel()


def test_no_devices_and_no_rows():
    net = Writer()
    assert torch.equal(DataParallel(net, []).call("write", LENGTHS)["texts"], net.write(LENGTHS)["texts"])
    assert DataParallel(net.to(cpu(1)[0]), cpu(2)).call("encode", torch.zeros(0, 2, device=cpu(1)[0])).shape == (0, 2)


def test_a_method_that_is_not_there_and_one_that_fails():
    model = DataParallel(Writer().to(cpu(1)[0]), cpu(2))
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        model.call("generate", torch.ones(2, 2, device=cpu(1)[0]))
    with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 0"):
        model.call("encode", torch.ones(2, 3, device=cpu(1)[0]))
    assert model(torch.ones(2, 2, device=cpu(1)[0])).shape == (2, 2)


def test_replicas_that_a_subclass_makes_and_calls():
    calls = []

    class Own(DataParallel):
        def parallel_apply(self, replicas, inputs, kwargs):
            calls.append(len(replicas))
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs, output_device):
            calls.append("gather")
            return super().gather(outputs, output_device)

    net, lengths = Writer().to(cpu(1)[0]), LENGTHS.to(cpu(1)[0])
    found = Own(net, cpu(2)).call("write", lengths, pad_value=-1)
    assert torch.equal(found["texts"], net.write(lengths)["texts"])
    assert calls == [2, "gather"]
