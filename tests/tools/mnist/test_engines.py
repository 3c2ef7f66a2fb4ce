"""Every engine learns what the bare network learns, from windows of any length, and leaves a plain network behind."""

import pytest
import torch
from tools.mnist.histories import assert_same_curve, is_plain

from mgpu_core.tools.mnist import Config, Digits, SimpleNet, Training
from mgpu_core.tools.mnist.model import MODELS
from mgpu_core.tools.mnist.train import train

pytestmark = pytest.mark.slow

TEAMS = [("step", 1), ("step", 2), ("step", 4), ("drop-in", 1), ("drop-in", 3), ("plain", 1)]


def run(digits: Digits, engine: str, ranks: int, **settings: object) -> Training:
    return train(Config(engine=engine, device_ids=("cpu",) * ranks, **settings), digits=digits)


@pytest.fixture(scope="module")
def bare(builtin: Digits) -> Training:
    return run(builtin, "plain", 1, epochs=2)


@pytest.mark.parametrize(("engine", "ranks"), TEAMS[:-1])
def test_same_curve_and_same_accuracy(builtin: Digits, bare: Training, engine: str, ranks: int) -> None:
    history = run(builtin, engine, ranks, epochs=2)
    assert_same_curve(history, bare)
    assert history.epochs[-1].accuracy == bare.epochs[-1].accuracy


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn", "simplenet"])
def test_every_size_of_batch_gives_the_same_curve(few: Digits, model: str) -> None:
    for batch in (1, 7, 75, 1000):
        # In 150 steps ten times as long, one after each image, the last bits of the first grow into other curves.
        settings: dict[str, object] = {"model": model, "batch": batch, "epochs": 1, "lr": 0.001}
        assert_same_curve(run(few, "step", 3, **settings), run(few, "plain", 1, **settings))


@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_four_batches_per_update_are_one_batch_of_all_their_rows(few: Digits, engine: str, ranks: int) -> None:
    """Of 150 rows, 16 at a time: windows of 64, 64 and 22 rows, the last one of two batches, which are not alike."""
    windows = run(few, engine, ranks, batch=16, accumulate=4, epochs=2, lr=0.1)
    batches = run(few, "plain", 1, batch=64, epochs=2, lr=0.1)
    for one, other in zip(windows.net.parameters(), batches.net.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    losses = windows.epochs[0].step_losses
    assert len(losses) == 10
    assert sum(losses[:4]) / 4 == pytest.approx(batches.step_losses[0], abs=1e-5)
    assert (16 * losses[8] + 6 * losses[9]) / 22 == pytest.approx(batches.step_losses[2], abs=1e-5)


@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_a_window_may_be_longer_than_the_epoch(few: Digits, engine: str, ranks: int) -> None:
    long = run(few, engine, ranks, batch=64, accumulate=100, epochs=2)
    assert_same_curve(long, run(few, "plain", 1, batch=64, accumulate=3, epochs=2))


@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_every_rank_has_a_part_of_every_batch(
    few: Digits, monkeypatch: pytest.MonkeyPatch, engine: str, ranks: int
) -> None:
    """Three steps of 64, 64 and 22 rows, and a test of 100."""
    rows: list[int] = []

    class Counted(SimpleNet):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            rows.append(len(images))
            return super().forward(images)

    monkeypatch.setitem(MODELS, "counted", Counted)
    run(few, engine, ranks, model="counted", epochs=1)
    chunks = [len(each) for count in (64, 64, 22, 100) for each in torch.empty(count).tensor_split(ranks)]
    assert sorted(rows) == sorted(chunks)


@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_the_network_is_a_plain_one_afterwards(few: Digits, engine: str, ranks: int) -> None:
    training = Training(Config(engine=engine, device_ids=("cpu",) * ranks, epochs=1), digits=few)
    net = training.run().net
    assert is_plain(net)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    net(torch.randn(4, 1, 28, 28)).sum().backward()
    training.optimizer.step()
    assert not any(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
