"""The wrapper learns what the bare network learns, step by step, and the caller's process is left as it was."""

import math

import pytest
import torch
from tools.mnist.histories import assert_same_curve

from mgpu_core.tools.mnist import Config, Digits, Training
from mgpu_core.tools.mnist.train import train


def plain(digits: Digits, **settings: object) -> Training:
    return train(Config(engine="plain", device_ids=("cpu",), **settings), digits=digits)


def drop_in(digits: Digits, ranks: int, **settings: object) -> Training:
    return train(Config(engine="drop-in", device_ids=("cpu",) * ranks, **settings), digits=digits)


@pytest.mark.slow
def test_five_epochs_of_simplenet(builtin: Digits) -> None:
    bare, wrapped = plain(builtin), drop_in(builtin, 4)
    assert_same_curve(bare, wrapped)
    assert bare.epochs[-1].accuracy == wrapped.epochs[-1].accuracy
    losses = [epoch.loss for epoch in bare.epochs]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6
    assert 0.85 <= bare.epochs[-1].accuracy <= 0.95


def test_an_epoch_is_recorded_as_it_was(builtin: Digits) -> None:
    (epoch,) = plain(builtin, epochs=1).epochs
    assert epoch.number == 1
    assert len(epoch.step_losses) == math.ceil(4000 / 64)
    whole, last = epoch.step_losses[:-1], epoch.step_losses[-1]
    assert epoch.loss == pytest.approx((64 * sum(whole) + 32 * last) / 4000, rel=1e-6)


def test_accuracy_is_that_of_the_returned_network(builtin: Digits) -> None:
    training = plain(builtin, epochs=2)
    images = (builtin.test.images / 255 - 0.1307) / 0.3081
    right = training.net(images).argmax(1) == builtin.test.labels
    assert training.epochs[-1].accuracy == right.double().mean().item()


@pytest.mark.parametrize(
    ("model", "ranks", "batch"),
    [
        pytest.param("cnn", 2, 64, id="cnn"),
        pytest.param("cnn", 3, 75, id="cnn, unequal chunks"),
        pytest.param("simplenet", 1, 64, id="one rank"),
        pytest.param("simplenet", 4, 7, id="a last batch with fewer rows than ranks"),
        pytest.param("simplenet", 3, 1, id="one row"),
        pytest.param("simplenet", 2, 1000, id="one batch"),
    ],
)
def test_every_split_gives_the_same_curve(few: Digits, model: str, ranks: int, batch: int) -> None:
    settings: dict[str, object] = {"model": model, "batch": batch, "epochs": 1}
    assert_same_curve(plain(few, **settings), drop_in(few, ranks, **settings))


@pytest.mark.parametrize("ranks", [0, 4], ids=["plain", "drop-in"])
def test_one_seed_gives_one_result(few: Digits, ranks: int) -> None:
    def losses(seed: int) -> list[float]:
        training = drop_in(few, ranks, seed=seed, epochs=2) if ranks else plain(few, seed=seed, epochs=2)
        return training.step_losses

    first = losses(7)
    torch.manual_seed(99)
    assert losses(7) == first
    assert losses(8) != first


def test_the_callers_generator_is_left_alone(few: Digits) -> None:
    before = torch.get_rng_state()
    plain(few, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_is_silent_or_not(few: Digits, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(engine="drop-in", device_ids=("cpu",) * 4, epochs=2)
    train(config, digits=few)
    assert capsys.readouterr().out == ""
    train(config, digits=few, verbose=True)
    first, *epochs = capsys.readouterr().out.splitlines()
    assert first == "simplenet, drop-in on cpu, cpu, cpu, cpu, batch 64, accumulate 1, float32, lr 0.01, seed 0"
    assert [line.split()[1] for line in epochs] == ["1/2", "2/2"]


def test_a_loss_that_is_not_finite_stops_the_training(few: Digits) -> None:
    with pytest.raises(FloatingPointError, match=r"epoch 1: the loss is (nan|inf); a smaller lr than 1e\+06"):
        plain(few, lr=1e6, batch=16)


def test_a_prepared_training_has_not_trained(few: Digits) -> None:
    training = Training(Config(engine="plain"), digits=few)
    assert training.epochs == []
    assert len(training.run().epochs) == 5
