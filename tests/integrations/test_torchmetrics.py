"""Metrics next to a net count all rows; so do those inside of it, whose ranks run one after the other."""

import time

import pytest
import torch
from torch import nn

import mgpu_core

pytestmark = pytest.mark.slow
torchmetrics = pytest.importorskip("torchmetrics")

ROUNDS, ROWS = 10, 13


def accuracy():
    return torchmetrics.classification.MulticlassAccuracy(3, average="micro")


def batches():
    seeded = torch.Generator().manual_seed(0)
    for _ in range(ROUNDS):
        yield torch.randn(ROWS, 4, generator=seeded), torch.randint(3, (ROWS,), generator=seeded)


def counted(metric):
    return int(metric.tp + metric.fn)


def step_of(net, ranks, loss_fn=nn.functional.cross_entropy, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    return mgpu_core.TrainStep(net, loss_fn, optimizer, ["cpu"] * ranks, **options)


def test_outside_all_rows_are_counted(ranks):
    net, metrics = nn.Linear(4, 3), [accuracy() for _ in range(3)]
    model, step = mgpu_core.DataParallel(net, ["cpu"] * ranks), step_of(net, ranks)
    for x, y in batches():
        for metric, scores in zip(metrics, (net(x), model(x), step(x, y, return_outputs=True)[1]), strict=True):
            metric.update(scores, y)
    assert [counted(metric) for metric in metrics] == [ROUNDS * ROWS] * 3
    assert len({metric.compute().item() for metric in metrics}) == 1


class Measured(nn.Module):
    """A net with a metric, whose update reads the state before the other ranks have written it."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.linear, self.accuracy, self.seconds = nn.Linear(4, 3), accuracy(), seconds
        update = self.accuracy._update_state

        def slow(*counts):
            before = self.accuracy.tp.clone(), self.accuracy.fn.clone()
            time.sleep(self.seconds)
            update(*counts)
            if self.seconds:
                self.accuracy.tp, self.accuracy.fn = before[0] + counts[0], before[1] + counts[3]

        self.accuracy._update_state = slow

    def forward(self, x, y):
        scores = self.linear(x)
        self.accuracy.update(scores, y)
        return scores


@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.parametrize("seconds", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["drop-in", "step"])
def test_inside_all_rows_are_counted(ranks, kind, seconds, workers):
    net = Measured(seconds)
    if kind == "step":
        step = step_of(net, ranks, workers=workers)
        for x, y in batches():
            step(x, y, y)
    else:
        model = mgpu_core.DataParallel(net, ["cpu"] * ranks, workers=workers)
        for x, y in batches():
            model(x, y)
    assert counted(net.accuracy) == ROUNDS * ROWS
