"""The progress bar is for eyes, and what is written is strict JSON."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_core.mnist import Config, ConsoleReport, Digits
from mgpu_core.mnist.train import train


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def bar_of_two_steps(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with ConsoleReport().steps(3, 2) as done:
        done()
        done()
    return stream.getvalue()


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    assert "epoch 3" in bar_of_two_steps(Terminal(), monkeypatch)


def test_no_bar_without_a_terminal_or_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bar_of_two_steps(io.StringIO(), monkeypatch) == ""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert bar_of_two_steps(Terminal(), monkeypatch) == ""


def test_outputs_do_not_change_the_training(tmp_path: Path, few: Digits) -> None:
    pytest.importorskip("matplotlib")
    config = Config(engine="plain", device_ids=("cpu",), epochs=2)
    outputs = {"save": tmp_path / "a.pt", "json": tmp_path / "a.json", "plot": tmp_path / "a.png"}
    assert train(replace(config, **outputs), digits=few).step_losses == train(config, digits=few).step_losses
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png", "a.pt"]
