"""A resumed training is the uninterrupted one, bit for bit; a checkpoint that is not whole or not fit is refused."""

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tools.mnist.histories import assert_same_bits
from torch import nn

from mgpu_core.tools.mnist import Config, Digits, Split, Training
from mgpu_core.tools.mnist.model import MODELS
from mgpu_core.tools.mnist.train import train

pytestmark = pytest.mark.slow

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


def resume(path: Path, digits: Digits, **settings: object) -> Training:
    config = Config(engine="plain", device_ids=("cpu",), epochs=3, resume=path)
    return train(replace(config, **settings), digits=digits)


@pytest.mark.parametrize("model", ["simplenet", "cnn"])
@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_resume_gives_the_same_bits(tmp_path: Path, few: Digits, engine: str, ranks: int, model: str) -> None:
    path = tmp_path / "a.pt"
    whole = Config(model=model, engine=engine, device_ids=("cpu",) * ranks, epochs=3)
    train(replace(whole, epochs=1, save=path), digits=few)
    resumed = train(replace(whole, resume=path, save=path), digits=few)
    assert [epoch.number for epoch in resumed.epochs] == [1, 2, 3]
    assert_same_bits(resumed, train(whole, digits=few))


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


def test_a_checkpoint_holds_the_weights_and_little_else(tmp_path: Path, few: Digits) -> None:
    """A live step's parameters are parts of one buffer, which has paddings, and would go along whole."""
    path = tmp_path / "a.pt"
    train(Config(engine="step", device_ids=("cpu",) * 2, epochs=1, save=path), digits=few)
    assert 4 * 101_770 < path.stat().st_size < 4 * 101_770 + 20_000


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": "cnn"}, "made with model simplenet; this run has model cnn$"),
        ({"lr": 0.1, "batch": 32}, "made with batch 64, lr 0.01; this run has batch 32, lr 0.1$"),
        ({"amp": "bfloat16", "engine": "step"}, "made with amp None; this run has amp bfloat16$"),
        ({"accumulate": 2}, "made with accumulate 1; this run has accumulate 2$"),
        ({"seed": 1}, "made with seed 0; this run has seed 1$"),
        ({"epochs": 1}, r"epochs: wanted more than the 1 of .*one\.pt, got 1$"),
    ],
)
def test_settings_that_do_not_match_are_named(saved: Path, few: Digits, settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        resume(saved, few, **settings)


def test_other_digits_are_refused(saved: Path, few: Digits) -> None:
    others = Digits(few.train, Split(few.test.images, few.test.labels.flip(0)))
    with pytest.raises(ValueError, match=r"made with digits [0-9a-f]{64}; this run has digits [0-9a-f]{64}$"):
        resume(saved, others)


def test_truncated_and_damaged_files_are_refused(saved: Path, tmp_path: Path, few: Digits) -> None:
    whole, path = saved.read_bytes(), tmp_path / "damaged.pt"
    intact = resume(saved, few, epochs=2)
    draw = random.Random(0)
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"damaged\.pt is damaged, or not a checkpoint of mgpu mnist"):
            resume(path, few)
    refused = 0
    for _ in range(30):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            came = resume(path, few, epochs=2)
        except ValueError:
            refused += 1
            continue
        # Between the members lies padding, in which a bit means nothing.
        assert_same_bits(came, intact)
    assert refused >= 25


@pytest.mark.parametrize("content", [{"weight": torch.zeros(3)}, [1, 2]], ids=["weights", "list"])
def test_other_torch_files_are_refused(tmp_path: Path, few: Digits, content: object) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt is damaged, or not .*it has no mark 'mgpu_core.mnist checkpoint"):
        resume(tmp_path / "other.pt", few)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"state": {}}, id="no state"),
        pytest.param({"settings": []}, id="no settings"),
        pytest.param({"epochs": [{"number": 1}]}, id="half an epoch"),
    ],
)
def test_a_checkpoint_with_a_wrong_part_is_refused(
    saved: Path, tmp_path: Path, few: Digits, change: dict[str, object]
) -> None:
    path = tmp_path / "changed.pt"
    torch.save(torch.load(saved, weights_only=True) | change, path)
    with pytest.raises(ValueError, match=r"changed\.pt is damaged, or not a checkpoint of mgpu mnist"):
        resume(path, few)


def test_a_file_from_a_stranger_runs_no_code(tmp_path: Path, few: Digits) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"state": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="is damaged, or not a checkpoint"):
        resume(tmp_path / "evil.pt", few)
    assert not (tmp_path / "owned").exists()


def test_a_failed_resume_changes_nothing(saved: Path, few: Digits) -> None:
    before = saved.read_bytes()
    with pytest.raises(ValueError, match="this run has seed 3"):
        Training(Config(engine="plain", resume=saved, save=saved, seed=3), digits=few)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]
