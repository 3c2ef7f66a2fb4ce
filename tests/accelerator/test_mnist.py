"""The MNIST reference from its command to its checkpoint on an accelerator that torch knows as a plug-in."""

import json

import pytest
import torch

from mgpu_core.cli import main


def trained(folder, *words):
    """Return the JSON of one epoch."""
    file = folder / "run.json"
    with torch.device("cpu"):  # weights are drawn there, as outside of these tests
        assert main(["mnist", "--epochs", "1", "--json", str(file), *words]) == 0
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["step", "drop-in", "plain"])
def test_an_epoch_on_the_accelerator(tmp_path, engine, capsys):
    words = ["--engine", engine, *(["--ranks", "2"] if engine != "plain" else [])]
    run = trained(tmp_path, *words)
    devices = ["fake:0"] if engine == "plain" else ["fake:0", "fake:1"]
    assert run["environment"]["devices"] == devices
    assert run["environment"]["device_names"] == ["fake"]
    on_cpu = trained(tmp_path, "--engine", engine, "--device-ids", ",".join(["cpu"] * len(devices)))
    losses = [run["epochs"][0]["step_losses"], on_cpu["epochs"][0]["step_losses"]]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert torch.accelerator.current_accelerator().type == "fake"
