"""The case of parameters in shards: who takes part in which row, and that nobody passes with another step."""

import json
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from benchmarks.run import main
from mgpu_core import TrainStep
from mgpu_core.tools.bench.cases import shards
from mgpu_core.tools.bench.fsdp import LR, FsdpRank, ShardsTask
from mgpu_core.tools.bench.gloo import GlooTeam
from mgpu_core.tools.bench.training import torch_step

pytestmark = pytest.mark.slow

TINY = ["shards", "--layers", "3", "--width", "16", "--repeats", "1"]
TASK = ShardsTask("cpu", ranks=2, layers=3, width=16, batch=6)

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


@needs_gloo
def test_a_row_per_batch_with_all_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--batch", "4,6", "--json", str(tmp_path / "x.json")]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["labels"]["batch"] for row in rows] == [4, 6]
    assert [list(row["seconds"]) for row in rows] == [["ours", "copies", "fsdp2"]] * 2
    assert "In all rows: device cpu, ranks 2, layers 3, width 16" in capsys.readouterr().out


@needs_gloo
def test_fsdp2_is_verified_against_the_whole_batch() -> None:
    with GlooTeam(2, FsdpRank) as team:
        team.prepare(TASK)
        assert team.wrong(1) == 0
        assert team.run() > 0
        assert team.wrong(2) == 0
        # Of seven rows one rank has four, and the mean of means is another.
        team.prepare(ShardsTask("cpu", ranks=2, layers=3, width=16, batch=7))
        assert team.wrong(1) > 0


def test_a_parameter_that_is_not_updated_is_wrong() -> None:
    truth, before = TASK.network(), TASK.network()
    torch_step(truth, SGD(truth.parameters(), lr=LR))(*TASK.rows(1))
    updated = list(truth.parameters())
    assert TASK.wrong(updated, 1) == 0
    for index, parameter in enumerate(before.parameters()):
        assert TASK.wrong([*updated[:index], parameter, *updated[index + 1 :]], 1) > 0, index


@pytest.mark.parametrize("shard", ["parameters", None])
def test_other_rows_are_wrong(
    shard: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = TrainStep.__call__

    def of_others(step: TrainStep, inputs: torch.Tensor, classes: torch.Tensor) -> object:
        return real(step, inputs.flip(0) if step.shard == shard else inputs, classes)

    monkeypatch.setattr(TrainStep, "__call__", of_others)
    assert main([*TINY, "--batch", "6", "--peers", "copies"]) == 1
    who = "copies" if shard is None else "ours"
    assert f"layers 3, width 16, batch 6: {who}: " in capsys.readouterr().err


def test_ranks_that_have_no_gpu_of_their_own_are_without_nccl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(shards, "ShardsTask", lambda _, *others: ShardsTask("cpu", *others))
    assert main([*TINY, "--batch", "6", "--device", "cuda", "--peers", "fsdp2"]) == 2
    assert "--peers fsdp2: NCCL needs a GPU for each rank" in capsys.readouterr().err
    assert main([*TINY, "--batch", "6", "--device", "cuda"]) == 0
    captured = capsys.readouterr()
    assert "note: without fsdp2: NCCL needs a GPU for each rank" in captured.err
    assert "| fsdp2 " not in captured.out


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--device", "cuda"], "--device cuda: torch sees no GPU here"),
        (["--batch", "64,7"], "--batch 7: FSDP2 needs equal shares"),
        (["--peers", "ddp"], "'ddp' is not one of copies, fsdp2"),
        (["--layers", "0"], "--layers"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_served_is_2(
    given: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        status: object = main(["shards", *given])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert (status, captured.err.count("\n"), captured.out) == (2, 1, "")
    assert reason in captured.err


def test_the_bounds_are_about_the_rows_of_a_default_run() -> None:
    rows = [{"device": "cpu", "ranks": 2, "layers": 8, "width": 512, "batch": batch} for batch in (64, 512)]
    for bound in shards.CASE.bounds:
        assert [row for row in rows if bound.where.items() <= row.items()], bound
        assert bound.peer in shards.CASE.peers
