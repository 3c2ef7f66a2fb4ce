"""Every engine learns what the bare network learns, from windows of any length, and leaves a plain network behind."""

import pytest
import torch
from mnist.histories import assert_same_curve, is_plain

from mgpu_core.mnist import Config, Digits, History, Training
from mgpu_core.mnist.train import train
from mgpu_core.train.step import TrainStep

TEAMS = [("step", 1), ("step", 2), ("step", 4), ("drop-in", 1), ("drop-in", 3), ("plain", 1)]
GRADIENT_NBYTES = 4 * 101_770
LOGITS_NBYTES = 4 * 10


def run(digits: Digits, engine: str, ranks: int, **settings: object) -> History:
    return train(Config(engine=engine, device_ids=("cpu",) * ranks, **settings), digits=digits)


@pytest.fixture(scope="module")
def bare(builtin: Digits) -> History:
    return run(builtin, "plain", 1, epochs=2)


@pytest.mark.parametrize(("engine", "ranks"), TEAMS[:-1])
def test_same_curve_and_same_accuracy(builtin: Digits, bare: History, engine: str, ranks: int) -> None:
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


def test_the_step_moves_gradients_and_outputs_and_nothing_else(few: Digits) -> None:
    """Three steps and a test of 100: rows and values are never sent, they are there."""
    counters = run(few, "step", 2, epochs=1).counters
    for rank in (0, 1):
        assert counters.pop(("reduce", "direct", rank)) == (3, 3 * GRADIENT_NBYTES)
        assert counters.pop(("gather", "direct", rank)) == (1, 50 * LOGITS_NBYTES)
    assert counters == {}


def test_gradients_are_summed_once_per_update(few: Digits) -> None:
    counters = run(few, "step", 2, batch=16, accumulate=4, epochs=1).counters
    assert [counters["reduce", "direct", rank] for rank in (0, 1)] == [(3, 3 * GRADIENT_NBYTES)] * 2


def test_shares_are_parts_of_the_rows_of_the_wrapper(few: Digits) -> None:
    history = run(few, "drop-in", 2, shares=(3.0, 1.0), batch=50, epochs=2)
    assert_same_curve(history, run(few, "plain", 1, batch=50, epochs=2))
    first, second = (history.counters["scatter", "direct", rank][1] for rank in (0, 1))
    assert 2.9 < first / second < 3.1


def test_shares_are_parts_of_the_rows_of_the_step(few: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[list[int]] = []

    def counted(step: TrainStep, *batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = original(step, *batch)
        rows.append([each.rows for each in step.plan()])
        return loss

    original = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", counted)
    history = run(few, "step", 2, shares=(3.0, 1.0), batch=48, epochs=2)
    assert_same_curve(history, run(few, "plain", 1, batch=48, epochs=2))
    assert [36, 12] in rows


@pytest.mark.parametrize("engine", ["step", "drop-in"])
def test_shares_that_do_not_fit_the_ranks_are_refused_at_once(few: Digits, engine: str) -> None:
    config = Config(engine=engine, device_ids=("cpu",) * 2, shares=(1.0,), source="nowhere")
    with pytest.raises(ValueError, match="shares must have one number per rank: 2 ranks, 1 shares"):
        Training(config)


@pytest.mark.parametrize(("engine", "ranks"), TEAMS)
def test_the_network_is_a_plain_one_afterwards(few: Digits, engine: str, ranks: int) -> None:
    training = Training(Config(engine=engine, device_ids=("cpu",) * ranks, epochs=1), digits=few)
    net = training.run().net
    assert is_plain(net)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    net(torch.randn(4, 1, 28, 28)).sum().backward()
    training.optimizer.step()
    assert not any(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
