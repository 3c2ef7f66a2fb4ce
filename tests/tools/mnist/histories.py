"""What the tests of the training compare its results by."""

import pytest
import torch
from torch import nn

from mgpu_core.tools.mnist import Training


def assert_same_curve(first: Training, second: Training) -> None:
    assert len(first.step_losses) == len(second.step_losses)
    assert first.step_losses == pytest.approx(second.step_losses, rel=0, abs=1e-4)


def assert_same_bits(first: Training, second: Training) -> None:
    assert first.step_losses == second.step_losses
    for name, parameter in first.net.state_dict().items():
        assert torch.equal(parameter, second.net.state_dict()[name]), name
    assert [epoch.accuracy for epoch in first.epochs] == [epoch.accuracy for epoch in second.epochs]


def is_plain(net: nn.Module) -> bool:
    """Whether each parameter has memory of its own, and no hooks."""
    return all(
        parameter.untyped_storage().nbytes() == parameter.nbytes
        and not getattr(parameter, "_post_accumulate_grad_hooks", None)
        for parameter in net.parameters()
    )
