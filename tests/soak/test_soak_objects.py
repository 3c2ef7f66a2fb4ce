"""A thousand objects of each kind, made over new nets, used and dropped: nothing of them is alive afterwards."""

import gc
import threading
import weakref

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_core import DataParallel, Pipeline, Predictor, TrainStep, optim

ROUNDS = 1000

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


class Habits(nn.Module):
    """Draws, keeps an activation by a hook that is a method, and notes what it has done."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.is_ready = nn.Linear(4, 4), nn.Linear(4, 3), False
        self.first.register_forward_hook(self.keep)

    def keep(self, module, args, out):
        self.kept = out.detach()

    def forward(self, x):
        self.is_ready = True
        out = nn.functional.dropout(self.first(x), 0.5, self.training)
        return self.last(out + self.kept)


def wrapped(net, x, y):
    cross_entropy(DataParallel(net, cpu(2))(x), y).backward()


def stepped(net, x, y, workers="caller"):
    step = TrainStep(net, cross_entropy, optim.AdamW(net.parameters()), cpu(2), workers=workers)
    for _ in range(2):
        step(x, y)


def in_threads(net, x, y):
    stepped(net, x, y, "threads")


def piped(net, x, y):
    pipeline = Pipeline(net, cpu(2), split_points=["last"], chunks=2)
    step = TrainStep(pipeline, cross_entropy, torch.optim.SGD(pipeline.parameters(), lr=0.1))
    step(x, y)


def served(net, x, y):
    with Predictor(net.eval(), cpu(2), max_wait_ms=0) as predict:
        predict(x)


@pytest.mark.parametrize("use", [wrapped, stepped, in_threads, piped, served])
@pytest.mark.filterwarnings("ignore")
def test_nothing_of_a_thousand_is_alive(use):
    x, y = torch.randn(4, 4, device=cpu(1)[0]), torch.tensor([0, 1, 2, 0], device=cpu(1)[0])
    alive = weakref.WeakSet()
    use(Habits().to(cpu(1)[0]), x, y)
    gc.collect()
    threads, tensors = threading.active_count(), count_of_tensors()
    for _ in range(ROUNDS):
        net = Habits().to(cpu(1)[0])
        alive.add(net)
        use(net, x, y)
    del net
    gc.collect()
    assert len(alive) == 0
    assert threading.active_count() <= threads
    assert count_of_tensors() <= tensors


def count_of_tensors():
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
