"""The reference networks have the shapes and sizes that the documentation states."""

import pytest
import torch

from mgpu_core.tools.mnist import build_model


@pytest.mark.parametrize(("name", "weights"), [("simplenet", 101_770), ("cnn", 1_199_882)])
def test_shapes_and_sizes(name: str, weights: int) -> None:
    net = build_model(name)
    assert sum(parameter.numel() for parameter in net.parameters()) == weights
    assert net(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("name", ["simplenet", "cnn"])
def test_every_weight_takes_part(name: str) -> None:
    net = build_model(name)
    net(torch.randn(8, 1, 28, 28)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in net.parameters())
