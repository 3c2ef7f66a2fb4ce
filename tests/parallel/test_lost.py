"""Attributes that a forward assigns are lost, and said to be, once."""

import warnings

import pytest
import torch

import mgpu_core
from mgpu_core.parallel.lost import lost_attributes


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        self.inner.last = x
        return self.inner(x)


def test_warned_once_and_lost():
    module = Counting()
    model = mgpu_core.DataParallel(module, ["cpu"] * 2)
    with pytest.warns(UserWarning, match=r"Counting assigns steps, inner\.last"):
        model(torch.zeros(4, 2))
    assert module.steps == 0
    assert not hasattr(module.inner, "last")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.zeros(4, 2))


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)),
        torch.nn.utils.weight_norm(torch.nn.Linear(2, 3)),
        torch.nn.utils.spectral_norm(torch.nn.Linear(2, 3)),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 3)),
        torch.nn.LSTM(2, 3),
        torch.nn.TransformerEncoderLayer(2, 1, 4),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_modules_of_torch_lose_nothing(module):
    replica = mgpu_core.replicate(module, ["cpu"] * 2)[0]
    replica(torch.zeros(4, 4, 2)) if not isinstance(module, torch.nn.Sequential) else replica(torch.zeros(4, 2))
    assert lost_attributes(replica, module) == []
