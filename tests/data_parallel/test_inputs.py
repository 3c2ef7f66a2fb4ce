"""Odd inputs and outputs: none, few rows, flags, containers, scalars."""

import threading
from collections import UserDict

import pytest
import torch
from fakes.nets import Spy, chunks, cpu
from fakes.tensors import numbers
from fakes.wrapper import Lambda
from torch import nn

from mgpu_core import DataParallel, _core, data_parallel


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
@pytest.mark.parametrize("grad", [True, False])
def test_one_device_runs_the_module_itself_in_this_thread(grad):
    spy = Spy()
    wrapper = DataParallel(spy, ["cpu"])
    _core.reset_counters()
    x = numbers(6, 2)
    with torch.set_grad_enabled(grad):
        wrapper(x)
    (note,) = spy.seen
    assert (note["thread"], note["x"], note["weight"]) == (
        threading.get_ident(),
        x.data_ptr(),
        spy.linear.weight.data_ptr(),
    )
    assert _core.counters() == {}


@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 5, 8])
def test_no_inputs_run_once_on_the_first_rank(ranks):
    calls = []
    net = Lambda(lambda self: calls.append(1) or self.linear.weight * 2)
    assert torch.equal(DataParallel(net, cpu(ranks))(), net.linear.weight * 2)
    assert calls == [1]
    assert torch.equal(data_parallel(net, None, cpu(ranks)), net.linear.weight * 2)
    assert torch.equal(data_parallel(net, (), cpu(ranks), module_kwargs={}), net.linear.weight * 2)


def test_zero_rows_run_once_on_rank_0(ranks):
    spy = Spy()
    out = DataParallel(spy, cpu(ranks))(torch.ones(0, 2))
    assert out.shape == (0, 2)
    assert [(len(note["rows"]), note["weight"]) for note in spy.seen] == [(0, spy.linear.weight.data_ptr())]
    out.sum().backward()
    assert spy.linear.weight.grad.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("rows", [1, 2])
def test_fewer_rows_than_ranks_with_keyword_flags(ranks, rows):
    flags = []
    net = Lambda(lambda self, x, *, flag, y: flags.append(flag) or self.linear(x) + y)
    x, y = numbers(rows, 2), numbers(rows, 2)
    out = DataParallel(net, cpu(ranks))(x, flag="on", y=y)
    assert flags == ["on"] * min(ranks, rows)
    assert torch.equal(out, net.linear(x) + y)


def test_keywords_only(ranks):
    net = Lambda(lambda self, x, inputs, module: self.linear(x) + inputs + module)
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x=x, inputs=x, module=3)
    assert torch.equal(out, net.linear(x) + x + 3)


@pytest.mark.several_ranks
def test_different_numbers_of_rows_are_refused_before_anything_runs(ranks):
    spy = Spy()
    _core.reset_counters()
    with pytest.raises(ValueError, match="differ in their number of rows") as caught:
        DataParallel(spy, cpu(ranks))(torch.ones(8, 2), y=[torch.ones(6)])
    assert "inputs[0] has shape (8, 2)" in str(caught.value)
    assert "kwargs['y'][0] has shape (6,)" in str(caught.value)
    assert spy.seen == []
    assert _core.counters() == {}


def test_outputs_of_every_structure(ranks):
    net = Lambda(lambda self, x: {"y": self.linear(x), "rest": [None, (x[:, 0], "text", 3)], "max": x.max(1)})
    x = numbers(8, 2)
    out = DataParallel(net, cpu(ranks))(x)
    assert torch.equal(out["y"], net.linear(x))
    assert out["rest"][0] is None
    assert torch.equal(out["rest"][1][0], x[:, 0])
    assert out["rest"][1][1:] == ("text", 3)
    assert torch.equal(out["max"].indices, x.max(1).indices)


@pytest.mark.several_ranks
def test_scalar_losses_become_a_vector(ranks):
    net = Lambda(lambda self, x: self.linear(x).sum())
    x = numbers(8, 2)
    with pytest.warns(UserWarning, match="will instead unsqueeze and return a vector"):
        losses = DataParallel(net, cpu(ranks))(x)
    assert losses.tolist() == [net(part).item() for part in x.split(chunks(8, ranks))]
    losses.sum().backward()
    assert net.linear.bias.grad.tolist() == [8, 8]


def test_containers_without_tensors_are_handed_on_as_they_are(ranks):
    class Logging(nn.Module):
        def forward(self, x, log, environment, *, seen):
            log["rows"] = log.get("rows", 0) + len(x)
            seen.append(environment["HOME"])
            return x

    log, seen = {}, []
    DataParallel(Logging(), cpu(ranks))(numbers(2 * ranks, 2), log, Environment(HOME="here", other=1), seen=seen)
    assert log == {"rows": 2 * ranks}
    assert seen == ["here"] * ranks


class Environment(UserDict):
    """Cannot be made from pairs."""

    def __init__(self, *, HOME, other):  # noqa: N803
        super().__init__({"HOME": HOME, "other": other})
