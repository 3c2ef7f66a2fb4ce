"""The training step's case: who takes part in which row, and that nobody passes with a step unlike the bare one's."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from benchmarks.run import main
from mgpu_core import TrainStep
from mgpu_core.tools.bench.cases import train_step
from mgpu_core.tools.bench.ddp_worker import DdpRank
from mgpu_core.tools.bench.gloo import GlooTeam
from mgpu_core.tools.bench.training import LR, Step, Trainee, TrainRow, torch_step

pytestmark = pytest.mark.slow

TINY = ["train_step", "--model", "simplenet", "--batch", "6", "--repeats", "1"]
BARE = ["--peers", "bare"]
TRAINING = TrainRow("simplenet", batch=6, ranks=2, steps=2)

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


def contestants_of(path: Path) -> dict[tuple[str, int], list[str]]:
    """By model and ranks, from the file that a run has written."""
    rows = json.loads(path.read_text())["rows"]
    return {(row["labels"]["model"], row["labels"]["ranks"]): list(row["seconds"]) for row in rows}


@needs_gloo
def test_ddp_takes_part_from_two_ranks_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--ranks", "1,2", "--json", str(tmp_path / "x.json")]) == 0
    assert contestants_of(tmp_path / "x.json") == {
        ("simplenet", 1): ["ours", "bare"],
        ("simplenet", 2): ["ours", "bare", "ddp"],
    }
    assert "| ddp " in capsys.readouterr().out


def test_rows_that_cannot_be_cut_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--ranks", "3", "--batch", "7", "--repeats", "1", "--json", str(tmp_path / "x.json")]
    assert main(["train_step", *given]) == 0
    assert contestants_of(tmp_path / "x.json") == {(model, 3): ["ours", "bare"] for model in ("simplenet", "cnn")}
    why = "without ddp: it needs equal shares, but 7 rows are not for 3 ranks"
    notes = [line for line in capsys.readouterr().err.splitlines() if ", round " not in line]  # on a busy machine
    assert notes == [f"run.py: note: {why}"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_run_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--ranks", "1,2", "--device", "cuda", "--peers", "bare,torch"]) == 0
    assert "| cuda " in capsys.readouterr().out


@needs_gloo
def test_ddp_is_verified_against_the_whole_batch() -> None:
    with GlooTeam(2, DdpRank) as team:
        team.prepare(TRAINING)
        assert team.wrong(1) == 0
        assert team.run() > 0
        assert team.wrong(2) == 0
        # Of seven rows the last is in nobody's share.
        team.prepare(TrainRow("simplenet", batch=7, ranks=2, steps=1))
        assert team.wrong(1) > 0


def test_rows_in_another_order_are_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda self, images, labels: real(self, images.flip(0), labels))
    assert main([*TINY, "--ranks", "2", *BARE]) == 1
    captured = capsys.readouterr()
    assert "run.py: error: model simplenet, device cpu, ranks 2, batch 6: ours: " in captured.err
    assert "wrong values" in captured.err
    assert "peer/ours" not in captured.out


def test_an_update_that_does_not_happen_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGD, "step", lambda self: None)
    assert Trainee(TRAINING, torch_step).wrong(1) > 0


def _late(network: nn.Module, optimizer: SGD) -> Step:
    """The gradients are cleared when they have been used."""
    step = torch_step(network, optimizer)

    def late(images: torch.Tensor, labels: torch.Tensor) -> None:
        step(images, labels)
        optimizer.zero_grad()

    return late


def _idle(_network: nn.Module, _optimizer: SGD) -> Step:
    return lambda images, labels: None


@pytest.mark.parametrize("way", [_idle, _late])
def test_gradients_that_are_not_there_are_wrong(way: Callable[[nn.Module, SGD], Step]) -> None:
    assert Trainee(TRAINING, way).wrong(1) > 0


def test_other_images_with_every_check() -> None:
    (images, labels), (others, _) = TRAINING.digits(1), TRAINING.digits(2)
    assert images.shape == (6, 1, 28, 28)
    assert labels.shape == (6,)
    assert not torch.equal(images, others)
    assert torch.equal(images, TRAINING.digits(1)[0])


def test_what_is_timed_goes_on_as_before_the_check() -> None:
    made: list[tuple[nn.Module, SGD]] = []

    def way(network: nn.Module, optimizer: SGD) -> Step:
        made.append((network, optimizer))
        return torch_step(network, optimizer)

    trainee = Trainee(TRAINING, way)
    trainee.train()
    assert trainee.wrong(1) == 0
    ((network, optimizer),) = made
    assert [group["lr"] for group in optimizer.param_groups] == [LR]
    assert all(map(torch.equal, network.parameters(), TRAINING.network().parameters()))


def test_the_time_is_that_of_one_step() -> None:
    steps: list[torch.Tensor] = []
    trainee = Trainee(TRAINING, lambda network, optimizer: lambda images, labels: steps.append(images))
    trainee.train()
    assert len(steps) == TRAINING.steps
    assert train_step._per_step(TRAINING, lambda: 3.0)() == 1.5


def test_every_step_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TrainStep] = []

    def making(*arguments: Any, **settings: Any) -> TrainStep:
        made.append(TrainStep(*arguments, **settings))
        return made[-1]

    monkeypatch.setattr(train_step, "TrainStep", making)
    assert main([*TINY, "--ranks", "1,2", *BARE]) == 0
    assert len(made) == 2
    for step in made:
        with pytest.raises(RuntimeError, match="closed"):
            step(*TRAINING.digits(1))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--peers", "torch"], "--peers torch: torch.nn.DataParallel needs a GPU"),
        (["--peers", "compile"], "--peers compile: torch.compile's graphs need a GPU"),
        (["--device", "cuda", "--peers", "ddp"], "--peers ddp: it runs over gloo, on the CPU only"),
        (["--batch", "7", "--ranks", "1,2", "--peers", "ddp"], "--peers ddp: it needs equal shares, but 7 rows"),
        (["--model", "resnet"], "'resnet' is not one of simplenet, cnn"),
        (["--ranks", "0"], "--ranks"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_served_is_2(
    given: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    try:
        status: object = main(["train_step", *given])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert (status, captured.err.count("\n"), captured.out) == (2, 1, "")
    assert reason in captured.err


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*TINY, "--device", "cuda", *BARE]) == 2
    assert "--device cuda: torch sees no GPU" in capsys.readouterr().err


def rows_of_a_run(*arguments: str) -> list[TrainRow]:
    parser = argparse.ArgumentParser()
    train_step.CASE.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.peers = []
    return [each for model in options.model for each in train_step._trainings(model, options)]


def test_the_bounds_are_about_the_rows_of_a_default_run() -> None:
    rows = rows_of_a_run()
    assert [(each.model, each.batch, each.ranks) for each in rows] == [
        ("simplenet", 64, 1),
        ("simplenet", 64, 2),
        ("cnn", 256, 2),
        ("cnn", 256, 4),
    ]
    rows += rows_of_a_run("--device", "cuda")
    for bound in train_step.CASE.bounds:
        assert [each for each in rows if bound.where.items() <= vars(each).items()], bound
        on_cpu = bound.where["device"] == "cpu"
        assert bound.peer in (train_step.CASE.peers if on_cpu else ("bare", "torch", "compile"))
