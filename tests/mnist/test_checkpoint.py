"""A resumed training is the uninterrupted one, bit for bit; a checkpoint that is not whole or not fit is refused."""

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mnist.histories import assert_same_bits
from torch import nn

from mgpu_core.mnist import Config, Digits, History, Report, Training
from mgpu_core.mnist.checkpoint import FORMAT, Checkpoint
from mgpu_core.mnist.model import MODELS
from mgpu_core.mnist.train import train

TEAMS = [
    pytest.param("step", 2, id="step"),
    pytest.param("plain", 1, id="plain"),
    pytest.param("drop-in", 4, id="drop-in"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, few: Digits) -> Path:
    """A checkpoint of the plain engine after one epoch."""
    path = tmp_path_factory.mktemp("checkpoint") / "one.pt"
    train(Config(engine="plain", device_ids=("cpu",), epochs=1, save=path), digits=few)
    return path


def resume(path: Path, digits: Digits, **settings: object) -> History:
    config = Config(engine="plain", device_ids=("cpu",), epochs=3, resume=path)
    return train(replace(config, **settings), digits=digits)


@pytest.mark.parametrize("model", ["simplenet", "cnn"])
@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_resume_gives_the_same_bits(tmp_path: Path, few: Digits, engine: str, ranks: int, model: str) -> None:
    whole = Config(model=model, engine=engine, device_ids=("cpu",) * ranks, epochs=3, save=tmp_path / "whole.pt")
    uninterrupted = train(whole, digits=few)
    part = tmp_path / "part.pt"
    train(replace(whole, epochs=1, save=part), digits=few)
    resumed = train(replace(whole, resume=part, save=part), digits=few)
    assert resumed.resumed_after == 1
    assert_same_bits(resumed, uninterrupted)
    first, second = Checkpoint.read(part), Checkpoint.read(tmp_path / "whole.pt")
    assert torch.equal(first.generator, second.generator)
    assert first.optimizer == second.optimizer


@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_resume_gives_the_same_bits_on_the_builtin_digits(tmp_path: Path, engine: str, ranks: int) -> None:
    whole = Config(engine=engine, device_ids=("cpu",) * ranks, epochs=3)
    train(replace(whole, epochs=1, save=tmp_path / "part.pt"))
    assert_same_bits(train(replace(whole, resume=tmp_path / "part.pt")), train(whole))


@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_resume_goes_on_drawing_where_it_stopped(
    tmp_path: Path, few: Digits, monkeypatch: pytest.MonkeyPatch, engine: str, ranks: int
) -> None:
    monkeypatch.setitem(MODELS, "dropout", lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10)))
    whole = Config(model="dropout", engine=engine, device_ids=("cpu",) * ranks, epochs=3)
    uninterrupted = train(whole, digits=few)
    train(replace(whole, epochs=1, save=tmp_path / "part.pt"), digits=few)
    torch.manual_seed(99)
    assert_same_bits(train(replace(whole, resume=tmp_path / "part.pt"), digits=few), uninterrupted)


def test_another_team_may_go_on_and_is_told(saved: Path, few: Digits) -> None:
    class Lines(Report):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def line(self, text: str) -> None:
            self.lines.append(text)

    report = Lines()
    train(Config(device_ids=("cpu",) * 2, shares=(2.0, 1.0), epochs=2, resume=saved), digits=few, report=report)
    assert report.lines[1] == f"resumed {saved} after epoch 1"
    assert report.lines[2].startswith(
        "note: it was made by plain on cpu; the last bits may differ on step on 2 x cpu, shares 2:1"
    )


@pytest.mark.parametrize(
    ("first", "second"), list(itertools.permutations(["step 1", "step 3", "drop-in 2", "plain 1"], 2))
)
def test_a_checkpoint_of_one_team_goes_on_in_another(tmp_path: Path, few: Digits, first: str, second: str) -> None:
    def config(team: str) -> Config:
        engine, ranks = team.split()
        return Config(engine=engine, device_ids=("cpu",) * int(ranks), epochs=3)

    path = tmp_path / "a.pt"
    train(replace(config(first), epochs=1, save=path), digits=few)
    resumed = train(replace(config(second), resume=path), digits=few)
    uninterrupted = train(config("plain 1"), digits=few)
    assert resumed.step_losses == pytest.approx(uninterrupted.step_losses, rel=0, abs=1e-4)


def test_a_checkpoint_holds_the_weights_and_nothing_else(tmp_path: Path, few: Digits, saved: Path) -> None:
    """A live step's parameters are parts of one buffer, which has paddings, and would go along whole."""
    path = tmp_path / "a.pt"
    train(Config(engine="step", device_ids=("cpu",) * 2, epochs=1, save=path), digits=few)
    state = torch.load(path, weights_only=True)["net"]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
    assert path.stat().st_size == pytest.approx(saved.stat().st_size, abs=500)
    assert path.stat().st_size < 4 * 101_770 + 10_000
    assert state._metadata == {"": {"version": 1}, "hidden": {"version": 1}, "output": {"version": 1}}


def test_a_checkpoint_from_before_accumulation_and_amp_goes_on(saved: Path, tmp_path: Path, few: Digits) -> None:
    content = torch.load(saved, weights_only=True)
    del content["settings"]["accumulate"], content["settings"]["amp"], content["loss_scale"]
    torch.save(content, tmp_path / "old.pt")
    assert_same_bits(resume(tmp_path / "old.pt", few), resume(saved, few))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": "cnn"}, "made with model simplenet; this run has model cnn$"),
        ({"lr": 0.1, "batch": 32}, "made with batch 64, lr 0.01; this run has batch 32, lr 0.1$"),
        ({"amp": "bfloat16", "engine": "step"}, "made with amp None; this run has amp bfloat16$"),
        ({"accumulate": 2}, "made with accumulate 1; this run has accumulate 2$"),
        ({"seed": 1}, "made with seed 0; this run has seed 1$"),
        ({"epochs": 1}, "one.pt: already after epoch 1; epochs: wanted more, got 1"),
    ],
)
def test_settings_that_do_not_match_are_named(saved: Path, few: Digits, settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        resume(saved, few, **settings)


def test_other_digits_are_refused(saved: Path, few: Digits) -> None:
    with pytest.raises(ValueError, match="made with digits few digits; this run has digits other"):
        resume(saved, replace(few, digest="other"))


def test_truncated_and_damaged_files_are_refused(saved: Path, tmp_path: Path) -> None:
    whole, path = saved.read_bytes(), tmp_path / "damaged.pt"
    intact = Checkpoint.read(saved)
    draw = random.Random(0)
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"damaged\.pt is damaged, or not a checkpoint of mgpu mnist"):
            Checkpoint.read(path)
    for _ in range(60):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            came = Checkpoint.read(path)
        except ValueError:
            continue
        # Between the members lies padding, in which a bit means nothing.
        assert all(torch.equal(value, intact.net[name]) for name, value in came.net.items())
        assert came.epochs == intact.epochs


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param({"weight": torch.zeros(3)}, "wanted a file with the mark", id="weights"),
        pytest.param([1, 2], "wanted a file with the mark", id="list"),
        pytest.param({"format": FORMAT}, "wanted a checkpoint with settings, team", id="empty"),
    ],
)
def test_other_torch_files_are_refused(tmp_path: Path, content: object, told: str) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=told):
        Checkpoint.read(tmp_path / "other.pt")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"net": {}}, id="no weights"),
        pytest.param({"optimizer": {}}, id="no optimizer"),
        pytest.param({"generator": torch.zeros(3)}, id="no generator"),
        pytest.param({"settings": []}, id="no settings"),
        pytest.param({"epochs": [{"number": 1}]}, id="half an epoch"),
        pytest.param({"more": 1}, id="one more part"),
        pytest.param({1: 2}, id="a part without a name"),
        pytest.param({"optimizer": {"state": {0: 5}, "param_groups": []}}, id="another optimizer"),
    ],
)
def test_a_checkpoint_with_a_wrong_part_is_refused(
    saved: Path, tmp_path: Path, few: Digits, change: dict[str, object]
) -> None:
    path = tmp_path / "changed.pt"
    torch.save(torch.load(saved, weights_only=True) | change, path)
    with pytest.raises(ValueError, match=r"changed\.pt: "):
        resume(path, few)


@pytest.mark.parametrize("change", ["lr", "momentum", "losses"])
def test_a_checkpoint_that_is_wrong_inside_is_refused(saved: Path, tmp_path: Path, few: Digits, change: str) -> None:
    path, content = tmp_path / "changed.pt", torch.load(saved, weights_only=True)
    if change == "lr":
        del content["optimizer"]["param_groups"][0]["lr"]
    elif change == "momentum":
        content["optimizer"]["state"] = {0: {"momentum_buffer": torch.zeros(2)}}
    else:
        content["epochs"][0]["step_losses"] = "abc"
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"changed\.pt: "):
        resume(path, few)


def test_a_file_from_a_stranger_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"format": FORMAT, "net": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="is damaged, or not a checkpoint"):
        Checkpoint.read(tmp_path / "evil.pt")
    assert not (tmp_path / "owned").exists()


def test_a_failed_resume_changes_nothing(saved: Path, few: Digits) -> None:
    before = saved.read_bytes()
    with pytest.raises(ValueError):
        Training(Config(engine="plain", resume=saved, save=saved, seed=3), digits=few)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]
