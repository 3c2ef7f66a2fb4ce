"""The reference training: SGD on MNIST, by one of the engines (see `engines`).

Everything that can be wrong (devices, files, digits, checkpoint) is found while the training is prepared, before
its first step; after that only the machine can fail.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mgpu_core import _core, explain, optim
from mgpu_core.extras import require
from mgpu_core.files import check_writable
from mgpu_core.mnist.checkpoint import Checkpoint, binding_settings
from mgpu_core.mnist.config import Config
from mgpu_core.mnist.devices import resolve_devices
from mgpu_core.mnist.digits import Digits, epoch_order, load
from mgpu_core.mnist.engines import Batch, make_engine
from mgpu_core.mnist.history import Epoch, History, counters_since
from mgpu_core.mnist.model import build_model
from mgpu_core.mnist.report import Report, write_json, write_plot
from mgpu_core.parallel.scatter_inputs import check_shares

TEST_BATCH = 1000
EXPLAIN_SKIP = 5  # the first steps are slow: buckets are laid out, threads and memory made
EXPLAIN_STEPS = 3


class Training:
    """A prepared training; `run` does it, once.

    Attributes:
        config: the settings.
        devices: one entry per rank.
        digits: the images and labels, on the first device.
        engine: makes the updates.
        history: the curves, growing by one record per epoch, and the bare network.
        saved_epochs: how many epochs the file `config.save` holds of this run; 0 if it was not written yet.
    """

    def __init__(self, config: Config, *, digits: Digits | None = None, report: Report | None = None) -> None:
        """Prepare the training of `config`, on `digits` instead of `config.source` if they are given.

        Raises:
            ValueError: devices that do not exist, shares that do not fit them; damaged or unfit digits or checkpoint;
                nothing left to train.
            OSError: a file that cannot be read or written.
            ModuleNotFoundError: a missing extra; its text has the cure.
        """
        self.config, self.report = config, report or Report()
        self.devices = resolve_devices(config.device_ids, config.ranks, single=config.engine == "plain")
        check_shares(config.shares, len(self.devices))
        _check_outputs(config)
        resumed = None if config.resume is None else (config.resume, Checkpoint.read(config.resume))
        self.digits = (digits or load(config.source)).to(self.devices[0])
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(config.seed)
            net = build_model(config.model).to(self.devices[0])
            self._generator = torch.get_rng_state()
        self.optimizer = optim.SGD(net.parameters(), lr=config.lr)
        self.history = History(net, self.devices)
        self.saved_epochs = 0
        self._opening = [self._introduction()]
        if resumed is not None:
            self._resume(*resumed)
        self.engine = make_engine(config, net, self.optimizer, self.devices)
        if resumed is not None:
            self.engine.scale_losses(resumed[1].loss_scale)

    def run(self) -> History:
        """Train the epochs that are left, then writes the plot and the JSON file.

        The caller's global generator is as before when it returns, and the network is a plain one, also after an error.

        Raises:
            FloatingPointError: the loss is no longer finite; the checkpoint of the epoch before is kept.
            OSError: a file could not be written; the one before is kept.
        """
        before = _core.counters()
        with (
            self._explained(),
            contextlib.closing(self.engine),
            torch.random.fork_rng(devices=()),
            _repeatable_convolutions(),
        ):
            for text in self._opening:
                self.report.line(text)
            torch.set_rng_state(self._generator)
            self._epochs()
        self.history.counters = counters_since(before)
        self._write_outputs()
        return self.history

    def _epochs(self) -> None:
        for number in range(len(self.history.epochs) + 1, self.config.epochs + 1):
            record = self._epoch(number)
            self.history.epochs.append(record)
            self._save()
            self.report.epoch(record, self.config.epochs)

    def _epoch(self, number: int) -> Epoch:
        train = self.digits.train
        self.history.net.train()
        begin = time.perf_counter()
        order = epoch_order(train.count, self.config.seed, number).to(self.devices[0])
        sizes = [len(rows) for rows in torch.split(order, self.config.batch)]
        with self.report.steps(number, len(sizes)) as done:
            losses: list[torch.Tensor] = []
            for window in _windows(train.batches(order, self.config.batch), self.config.accumulate):
                losses += self.engine.train(window)
                for _ in window:
                    done()
        # Reading the losses waits for the device, so the clock is read after the work and not after its launch.
        step_losses = torch.stack(losses).tolist()
        seconds = time.perf_counter() - begin
        self._check_finite(number, step_losses)
        weighted = (loss * rows for loss, rows in zip(step_losses, sizes, strict=True))
        loss = math.fsum(weighted) / train.count
        return Epoch(number, loss, self._accuracy(), seconds, train.count / seconds, step_losses)

    def _accuracy(self) -> float:
        test = self.digits.test
        self.history.net.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self.devices[0])
        for images, labels in test.batches(torch.arange(test.count, device=self.devices[0]), TEST_BATCH):
            correct += self.engine.correct(images, labels)
        return int(correct) / test.count

    def _check_finite(self, number: int, losses: list[float]) -> None:
        for step, loss in enumerate(losses, start=1):
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"epoch {number}, step {step}: the loss is {loss}; a smaller lr than {self.config.lr:g} may help"
                )

    def _resume(self, path: Path, checkpoint: Checkpoint) -> None:
        finished = len(checkpoint.epochs)
        checkpoint.check_settings(path, binding_settings(self.config, self.digits.digest))
        if finished >= self.config.epochs:
            raise ValueError(f"{path}: already after epoch {finished}; epochs: wanted more, got {self.config.epochs}")
        checkpoint.restore(path, self.history.net, self.optimizer)
        self._generator = checkpoint.generator
        self.history.epochs = list(checkpoint.epochs)
        self.history.resumed_after = finished
        self._opening.append(f"resumed {path} after epoch {finished}")
        if checkpoint.team != self._team():
            self._opening.append(f"note: it was made by {checkpoint.team}; the last bits may differ on {self._team()}")

    def _save(self) -> None:
        if self.config.save is None:
            return
        settings = binding_settings(self.config, self.digits.digest)
        Checkpoint(
            settings,
            self._team(),
            self.history.net.state_dict(),
            self.optimizer.state_dict(),
            self.engine.loss_scale(),
            torch.get_rng_state(),
            self.history.epochs,
        ).write(self.config.save)
        self.saved_epochs = len(self.history.epochs)

    def _write_outputs(self) -> None:
        if self.config.plot is not None:
            write_plot(self.config.plot, self.config, self.history)
        if self.config.json is not None:
            write_json(self.config.json, self.config, self.history, self.digits.digest)
        for name, path in self.config.outputs().items():
            self.report.line(f"{name}: {path}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Record some steps, where a page of them is wanted."""
        if self.config.explain is None:
            yield
            return
        left = (self.config.epochs - len(self.history.epochs)) * math.ceil(self.digits.train.count / self.config.batch)
        skip = max(0, min(EXPLAIN_SKIP, left - EXPLAIN_STEPS))
        with explain(skip=skip, steps=EXPLAIN_STEPS) as trace:
            yield
        trace.save_html(self.config.explain)

    def _team(self) -> str:
        return self.config.team(self.devices)

    def _introduction(self) -> str:
        config, digits = self.config, self.digits
        weights = sum(parameter.numel() for parameter in self.history.net.parameters())
        return (
            f"{config.model} ({weights:,} parameters), {self._team()}, {config.pace()}, seed {config.seed}; "
            f"{digits.train.count:,} images to train on, {digits.test.count:,} to test with"
        )


def train(config: Config, *, digits: Digits | None = None, report: Report | None = None) -> History:
    """Prepare and run a training, write the files that `config` asks for, and return its history.

    Args:
        config: the settings.
        digits: the data, instead of `config.source`.
        report: hears of the progress; silent if None.

    Raises:
        ValueError, OSError, ModuleNotFoundError: before the first step (see `Training`).
        FloatingPointError, OSError: later (see `Training.run`).
    """
    return Training(config, digits=digits, report=report).run()


def _windows(batches: Iterator[Batch], count: int) -> Iterator[list[Batch]]:
    """Return the batches of each update; the last window may be shorter."""
    while window := list(itertools.islice(batches, count)):
        yield window


def _check_outputs(config: Config) -> None:
    for path in config.outputs().values():
        check_writable(path)
    if config.plot is not None:
        require("matplotlib", "a picture")


@contextlib.contextmanager
def _repeatable_convolutions() -> Iterator[None]:
    # cuDNN may else sum a weight's gradient in the order of arrival, and a resumed run would not give the same bits.
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
