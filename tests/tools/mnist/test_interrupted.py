"""A training that is cut off in the middle of a step: what it saved is whole, and goes on with the same bits."""

import itertools
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tools.mnist.histories import assert_same_bits, is_plain
from torch import nn

from mgpu_core.tools.cli import main
from mgpu_core.tools.mnist import Config, Digits, Training
from mgpu_core.tools.mnist.config import AMP_DTYPES
from mgpu_core.tools.mnist.model import MODELS
from mgpu_core.tools.mnist.train import train

pytestmark = pytest.mark.slow

TEAMS = [("step", 1), ("step", 2), ("drop-in", 2), ("plain", 1)]
STEPS_PER_EPOCH = 3  # of the few digits


class Stops(nn.Module):
    """Dropout and a linear layer; in training the call number `at` raises, counted over all ranks."""

    at: ClassVar[int] = -1
    error: ClassVar[BaseException] = RuntimeError("stopped")
    calls: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(0.5), nn.Linear(28 * 28, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(self.dropout(images.flatten(1)))
        if self.training and next(Stops.calls) == Stops.at:
            raise Stops.error
        return logits


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> type[Stops]:
    """The model, which counts its calls from 0, and stops at none."""
    monkeypatch.setitem(MODELS, "stops", Stops)
    for name, value in (("at", -1), ("error", RuntimeError("stopped")), ("calls", itertools.count())):
        monkeypatch.setattr(Stops, name, value)
    return Stops


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_a_step_that_raises(
    tmp_path: Path, few: Digits, stops: type[Stops], engine: str, ranks: int, accumulate: int
) -> None:
    path = tmp_path / "a.pt"
    whole = Config(model="stops", engine=engine, device_ids=("cpu",) * ranks, accumulate=accumulate, epochs=4)
    uninterrupted = train(whole, digits=few)
    for seed in range(3):
        stops.calls = itertools.count()
        stops.at = random.Random(seed).randrange(ranks * STEPS_PER_EPOCH, ranks * STEPS_PER_EPOCH * 4)
        training = Training(replace(whole, save=path), digits=few)
        with pytest.raises(RuntimeError, match="stopped"):
            training.run()
        assert len(training.epochs) == stops.at // (ranks * STEPS_PER_EPOCH)
        assert is_plain(training.net)
        stops.at = -1
        assert_same_bits(train(replace(whole, resume=path), digits=few), uninterrupted)


@pytest.mark.parametrize("amp", AMP_DTYPES)
def test_mixed_precision_goes_on_with_the_same_bits(tmp_path: Path, few: Digits, ranks: int, amp: str) -> None:
    """The loss scale too: the first updates overflow it, and are skipped."""
    path = tmp_path / "a.pt"
    config = Config(model="cnn", device_ids=("cpu",) * ranks, epochs=3, amp=amp)
    uninterrupted = train(config, digits=few)
    train(replace(config, epochs=1, save=path), digits=few)
    assert_same_bits(train(replace(config, resume=path), digits=few), uninterrupted)
    full = train(replace(config, amp=None), digits=few)
    assert uninterrupted.step_losses != full.step_losses
    assert uninterrupted.step_losses == pytest.approx(full.step_losses, rel=0.1)


@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_an_interrupt_inside_a_rank(
    folder: Path, stops: type[Stops], capsys: pytest.CaptureFixture[str], engine: str, ranks: int
) -> None:
    """30 digits are one step per epoch: the first call of the third epoch."""
    stops.at, stops.error = 2 * ranks, KeyboardInterrupt()
    arguments = ["--model", "stops", "--engine", engine, "--device-ids", ",".join(["cpu"] * ranks)]
    status = main(["mnist", *arguments, "--data", str(folder), "--save", str(folder / "a.pt")])
    assert status == 130
    assert capsys.readouterr().err == "mgpu mnist: error: interrupted; epochs done: 2\n"
    assert len(torch.load(folder / "a.pt", weights_only=True)["epochs"]) == 2


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    command = [sys.executable, "-P", "-m", "mgpu_core", "mnist", "--device-ids", "cpu,cpu", "--epochs", "100000"]
    with subprocess.Popen([*command, "--save", str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("epoch 2/"):
            assert process.poll() is None
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    saved = len(torch.load(path, weights_only=True)["epochs"])
    whole = Config(device_ids=("cpu",) * 2, epochs=saved + 1)
    assert saved >= 2
    assert_same_bits(train(replace(whole, resume=path)), train(whole))
