"""The architectures of the zoo over several devices: steps, outputs and answers are those of one device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache, partial

import pytest
import torch
from fakes.nets import cpu
from integrations.zoo import GENERATE, ROWS, ZOO, made
from torch import nn
from torch.utils._pytree import tree_leaves

from mgpu_core import Pipeline, Predictor, TrainStep, place

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS, CHUNKS = 3, 2
REQUESTS = [slice(0, 1), slice(1, 3), slice(3, 4), slice(0, 2), slice(2, 3), slice(2, 4)]
by_name = pytest.mark.parametrize("name", ZOO)


@pytest.fixture(autouse=True)
def new_tensors_are_on_the_host():
    """Some nets make numbers and indices there, for tensors on any device."""
    with torch.device("cpu"):
        yield


class Squares(nn.Module):
    """Adds a loss to a net that has none."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, **inputs):
        return sum(each.square().mean() for each in tensors_in(self.net(**inputs)) if each.is_floating_point())


def tensors_in(output):
    return [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]


def here(inputs, rows=slice(None)):
    """Return some rows of inputs on the first device."""
    return {name: each[rows].to(cpu(1)[0]) if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}


def as_expected(name, column):
    """Expect what the row says of the column."""
    if column not in ZOO[name].unlike:
        return nullcontext()
    error, words = ZOO[name].unlike[column]
    return pytest.raises(error, match=words)


def assert_close(found, wanted, within, what):
    assert len(found) == len(wanted), what
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=within, atol=within, equal_nan=True, msg=what)


def moved(net):
    """Return the net on the first device; torch's ``to`` may untie weights there, where memory is of another kind."""
    return net if cpu(1)[0] == "cpu" else place(net, cpu(1))


def trained(name):
    return made(name) if ZOO[name].labels else Squares(made(name))


def state_of(net):
    """Return copies of values and gradients, by name."""
    grads = {f"{name}.grad": each.grad for name, each in net.named_parameters() if each.grad is not None}
    return {name: each.detach().clone() for name, each in (net.state_dict() | grads).items()}


@lru_cache(maxsize=1)
def steps_alone(name):
    """Return the losses and the state of a net that steps over micro-batches, one after the other."""
    row, net = ZOO[name], moved(trained(name))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, ROWS, ROWS // CHUNKS):
            rows = slice(first, first + ROWS // CHUNKS)
            output = net(**here(row.inputs | row.labels, rows))
            loss = (output.loss if row.labels else output) / CHUNKS
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, state_of(net)


@pytest.mark.parametrize("stages", [2, 3])
@by_name
def test_steps_of_a_pipeline(name, stages):
    row, net = ZOO[name], trained(name)
    step = None
    with as_expected(name, "pipeline"):
        step = TrainStep(Pipeline(net, cpu(stages), chunks=CHUNKS), None, torch.optim.SGD(net.parameters(), lr=0.01))
        found = [float(step(**here(row.inputs | row.labels))) for _ in range(STEPS)]
    if "pipeline" in row.unlike:
        return
    losses, wanted = steps_alone(name)
    assert found == pytest.approx(losses, rel=1e-6)  # some compute it in float32
    state = state_of(net)
    assert list(state) == list(wanted)
    for each, value in wanted.items():
        assert_close([state[each]], [value], row.within, each)


@lru_cache(maxsize=1)
@torch.no_grad()
def outputs_alone(name):
    """Return what a net generates, if it does, and the outputs of a call."""
    row, net = ZOO[name], moved(made(name)).eval()
    texts = [net.generate(**here(row.inputs), **GENERATE)] if row.generate else []
    return texts, tensors_in(net(**here(row.inputs | row.beside)))


@pytest.mark.parametrize("parts", [2, 3])
@by_name
@torch.no_grad()
def test_a_placed_net(name, parts):
    row, net = ZOO[name], place(made(name).eval(), cpu(parts))
    texts, outputs = outputs_alone(name)
    for _ in range(2):
        for text in texts:
            assert torch.equal(net.generate(**here(row.inputs), **GENERATE), text)
        found = tensors_in(net(**here(row.inputs | row.beside)))
        assert {each.device for each in found} == {torch.device(cpu(1)[0])}
        assert_close(found, outputs, row.within, "an output")


@lru_cache(maxsize=1)
@torch.no_grad()
def answers_alone(name):
    row, net = ZOO[name], moved(made(name)).eval()
    return [tensors_in(net(**here(row.inputs | row.beside, rows))) for rows in REQUESTS]


@pytest.mark.parametrize("ranks", [1, 2])
@by_name
def test_answers_of_a_predictor(name, ranks):
    row = ZOO[name]
    column = "predictor" if "predictor" in row.unlike else f"predictor of {ranks}"
    requests = [slice(None)] if column == "predictor" else REQUESTS
    net = made(name)
    with Predictor(net, cpu(ranks), max_batch=ROWS, max_wait_ms=20) as predict, ThreadPoolExecutor(4) as threads:
        answered = partial(threads.map, lambda rows: predict(**here(row.inputs | row.beside, rows)))
        if column in row.unlike:
            error, words = row.unlike[column]
            with pytest.raises(error, match=words):
                list(answered(requests))
            return
        found = list(answered(requests))
    for one, other in zip(found, answers_alone(name), strict=True):
        assert_close(tensors_in(one), other, row.within, "an answer")
