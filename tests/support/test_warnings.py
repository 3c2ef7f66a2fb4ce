"""Warnings point at the line of the user's that led to them."""

import warnings

import pytest
import torch
from fakes.nets import cpu
from step.nets import Linear, mse
from torch.optim import SGD

import mgpu_core


class Counting(Linear):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return super().forward(x)


def a_drop_in():
    mgpu_core.DataParallel(Counting(), cpu(2))(torch.ones(4, 3))


def scalars():
    mgpu_core.gather([torch.ones(()), torch.ones(())], "cpu")


def an_old_device():
    mgpu_core.gather([torch.ones(2), torch.ones(2)], -1)


def a_step(**settings):
    net = Linear()
    loss_fn = mse if settings else lambda output, _: output.sum().square()  # which couples rows
    step = mgpu_core.TrainStep(net, loss_fn, SGD(net.parameters(), lr=0.1), cpu(2), **settings)
    for _ in range(2):
        step(torch.ones(4, 3), torch.zeros(4, 2))


def a_captured_step():
    a_step(capture=True)


class Distributions(Linear):
    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0)


def a_predictor():
    with mgpu_core.Predictor(Distributions(), cpu(1), max_batch=2, max_wait_ms=2000) as predict:
        for future in [predict.submit(torch.ones(1, 3)) for _ in range(2)]:
            future.result()


@pytest.mark.parametrize("call", [a_drop_in, scalars, an_old_device, a_step, a_captured_step, a_predictor])
def test_it_is_the_users_line(call):
    with warnings.catch_warnings(record=True, action="always") as told:
        call()
    assert [each.filename for each in told] == [__file__]
