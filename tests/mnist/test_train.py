"""The wrapper learns what the bare network learns, step by step, and the caller's process is left as it was."""

import math

import pytest
import torch
from mnist.histories import assert_same_curve

from mgpu_core.mnist import Config, Digits, Epoch, History, Report, Training
from mgpu_core.mnist.train import train

CPU4 = ("cpu",) * 4


def plain(digits: Digits, **settings: object) -> History:
    return train(Config(engine="plain", device_ids=("cpu",), **settings), digits=digits)


def drop_in(digits: Digits, ranks: int, **settings: object) -> History:
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
    assert epoch.images_per_second == pytest.approx(4000 / epoch.seconds)


def test_accuracy_is_that_of_the_returned_network(builtin: Digits) -> None:
    history = plain(builtin, epochs=2)
    images = (builtin.test.images / 255 - 0.1307) / 0.3081
    right = history.net(images).argmax(1) == builtin.test.labels
    assert history.epochs[-1].accuracy == right.double().mean().item()


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


def test_the_wrapper_really_ran_on_all_ranks(few: Digits) -> None:
    def ranks_of(history: History) -> set[int]:
        return {rank for _, _, rank in history.counters}

    assert ranks_of(drop_in(few, 4, epochs=1)) == {0, 1, 2, 3}
    assert plain(few, epochs=1).counters == {}


def test_counters_are_those_of_the_run(few: Digits) -> None:
    assert drop_in(few, 2, epochs=1).counters == drop_in(few, 2, epochs=1).counters


@pytest.mark.parametrize("ranks", [0, 4], ids=["plain", "drop-in"])
def test_one_seed_gives_one_result(few: Digits, ranks: int) -> None:
    def losses(seed: int) -> list[float]:
        history = drop_in(few, ranks, seed=seed, epochs=2) if ranks else plain(few, seed=seed, epochs=2)
        return history.step_losses

    first = losses(7)
    torch.manual_seed(99)
    assert losses(7) == first
    assert losses(8) != first


def test_the_callers_generator_is_left_alone(few: Digits) -> None:
    before = torch.get_rng_state()
    plain(few, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_report_hears_of_every_step(few: Digits) -> None:
    class Counting(Report):
        def __init__(self) -> None:
            self.lines: list[str] = []
            self.epochs: list[tuple[int, int]] = []

        def line(self, text: str) -> None:
            self.lines.append(text)

        def epoch(self, record: Epoch, epochs: int) -> None:
            self.epochs.append((record.number, epochs))

    report = Counting()
    train(Config(engine="drop-in", device_ids=CPU4, epochs=2), digits=few, report=report)
    assert report.epochs == [(1, 2), (2, 2)]
    (introduction,) = report.lines
    assert introduction.startswith(
        "simplenet (101,770 parameters), drop-in on 4 x cpu, batch 64, lr 0.01, seed 0; 150 "
    )


def test_a_loss_that_is_not_finite_stops_the_training(few: Digits) -> None:
    with pytest.raises(FloatingPointError, match=r"epoch 1, step \d: the loss is (nan|inf); a smaller lr than 1e\+06"):
        plain(few, lr=1e6, batch=16)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"batch": 0}, "batch: wanted at least 1, got 0"),
        ({"epochs": -1}, "epochs: wanted at least 1, got -1"),
        ({"accumulate": 0}, "accumulate: wanted at least 1, got 0"),
        ({"shares": (1.0, -1.0)}, "shares: wanted finite numbers above 0, got -1"),
        ({"shares": (math.nan,)}, "shares: wanted finite numbers above 0, got nan"),
        ({"shares": (1.0,), "engine": "plain"}, "shares: the plain engine trains on one device"),
        ({"ranks": 0}, "ranks: wanted at least 1, got 0"),
        ({"lr": math.nan}, "lr: wanted a finite number above 0, got nan"),
        ({"lr": math.inf}, "lr: wanted"),
        ({"lr": 0.0}, "lr: wanted"),
        ({"seed": -1}, "seed: wanted a number from 0 to"),
        ({"seed": 2**63}, "seed: wanted"),
        ({"model": "resnet"}, "model: wanted one of simplenet, cnn, got 'resnet'"),
        ({"engine": "ddp"}, "engine: wanted one of step, drop-in, plain, got 'ddp'"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Config(**settings)


def test_a_prepared_training_has_not_trained(few: Digits) -> None:
    training = Training(Config(engine="plain"), digits=few)
    assert training.history.epochs == []
    assert len(training.run().epochs) == 5
