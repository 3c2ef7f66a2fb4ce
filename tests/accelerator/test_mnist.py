"""The MNIST reference on an accelerator that torch knows as a plug-in."""

import pytest
import torch
from fakes import accelerator

from mgpu_core.tools.mnist import Config
from mgpu_core.tools.mnist.train import train


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["step", "drop-in", "plain"])
def test_an_epoch_on_the_accelerator(engine):
    ranks = 1 if engine == "plain" else 2
    team = accelerator.fakes(ranks)
    with torch.device("cpu"):  # weights are drawn there, as outside of these tests
        run = train(Config(engine=engine, device_ids=tuple(team), epochs=1))
        on_cpu = train(Config(engine=engine, device_ids=("cpu",) * ranks, epochs=1))
    assert run.devices == [torch.device(device) for device in team]
    assert run.step_losses == pytest.approx(on_cpu.step_losses, abs=1e-4)
