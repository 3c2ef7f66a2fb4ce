"""The reference training, SGD on MNIST, as a function and as the command `mgpu mnist`.

Everything that can be wrong (devices, files, digits, checkpoint) is found while a training is prepared, before its
first step; after that only the machine can fail. A file is written whole or not at all.
"""

import argparse
import dataclasses
import math
import sys
import time
from contextlib import closing, nullcontext

import torch

from mgpu_core import explain, optim
from mgpu_core.errors import Error
from mgpu_core.support.extras import require
from mgpu_core.support.files import check_outputs, check_picture
from mgpu_core.tools.mnist.checkpoint import Epoch, read_checkpoint, write_checkpoint
from mgpu_core.tools.mnist.config import Config
from mgpu_core.tools.mnist.digits import Digits, epoch_order, load
from mgpu_core.tools.mnist.engines import make_engine
from mgpu_core.tools.mnist.model import build_model
from mgpu_core.tools.mnist.plot import write_plot

TEST_BATCH = 1000
EXPLAIN_SKIP = 5  # the first steps are slow: buckets are laid out, threads and memory made
EXPLAIN_STEPS = 3


class Training:
    """A prepared training; `run` does it, once.

    Attributes:
        config: the settings.
        devices: one entry per rank.
        digits: the images and labels, on the first device.
        net: the network itself, without wrapper, on the first device; a plain one after `run`.
        optimizer: over its parameters.
        engine: makes the steps.
        epochs: a record per epoch that is done and saved, those before a resume included.
    """

    def __init__(self, config: Config, *, digits: Digits | None = None, verbose: bool = False) -> None:
        """Prepare the training.

        Args:
            config: the settings.
            digits: the data, instead of `config.source`.
            verbose: print lines that tell of the training.

        Raises:
            TypeError, ValueError: devices that do not exist; damaged or unfit digits or checkpoint; two outputs in one
                file; nothing left to train.
            OSError: a file that cannot be read or written.
            ModuleNotFoundError: a missing extra; its text has the cure.
        """
        self.config, self.devices, self._verbose = config, config.devices(), verbose
        self._outputs = [path for path in (config.save, config.plot, config.explain) if path is not None]
        inputs = [] if config.resume is None or config.resume == config.save else [config.resume]
        check_outputs(self._outputs, inputs)
        if config.plot is not None:
            check_picture(config.plot)
            require("matplotlib", "a picture")
        self.digits = (digits or load(config.source)).to(self.devices[0])
        names = ("model", "batch", "accumulate", "amp", "lr", "seed")
        self._settings = {name: getattr(config, name) for name in names} | {"digits": self.digits.digest()}
        self.epochs: list[Epoch] = []
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(config.seed)
            self.net = build_model(config.model).to(self.devices[0])
            self.optimizer = optim.SGD(self.net.parameters(), lr=config.lr)
            self.engine = make_engine(config, self.net, self.optimizer)
            if config.resume is not None:
                self.epochs = read_checkpoint(config.resume, self._settings, self.engine)
            self._generator = torch.get_rng_state()
        if len(self.epochs) >= config.epochs:
            raise ValueError(f"epochs: wanted more than the {len(self.epochs)} of {config.resume}, got {config.epochs}")

    @property
    def step_losses(self) -> list[float]:
        """The losses of all steps, in order."""
        return [loss for epoch in self.epochs for loss in epoch.step_losses]

    def run(self) -> "Training":
        """Train the epochs that are left, then write the page and the plot. Return the training itself.

        The caller's global generator is as before when it returns, and the network is a plain one, also after an error.

        Raises:
            FloatingPointError: the loss is no longer finite; the checkpoint of the epoch before is kept.
            OSError: a file could not be written; the one before is kept.
        """
        config, left = self.config, range(len(self.epochs) + 1, self.config.epochs + 1)
        steps = math.ceil(self.digits.train.count / config.batch) * len(left)
        skip = max(0, min(EXPLAIN_SKIP, steps - EXPLAIN_STEPS))
        recording = nullcontext() if config.explain is None else explain(skip=skip, steps=EXPLAIN_STEPS)
        with recording as trace, closing(self.engine), torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._generator)
            self._print(str(config))
            if self.epochs:
                self._print(f"resumed {config.resume} after epoch {len(self.epochs)}")
            for number in left:
                self._epoch(number)
        if config.explain is not None and trace is not None:
            trace.save_html(config.explain)
        if config.plot is not None:
            write_plot(config.plot, str(config), self.step_losses, [epoch.accuracy for epoch in self.epochs])
        for path in self._outputs:
            self._print(f"written: {path}")
        return self

    def _print(self, line: str) -> None:
        if self._verbose:
            print(line, flush=True)

    def _epoch(self, number: int) -> None:
        """Train one epoch, test after it, save, and tell of it."""
        seconds, losses = self._train(number)
        config, count = self.config, self.digits.train.count
        rows = [min(config.batch, count - begin) for begin in range(0, count, config.batch)]
        mean = math.fsum(loss * own for loss, own in zip(losses, rows, strict=True)) / count
        if not math.isfinite(mean):
            raise FloatingPointError(f"epoch {number}: the loss is {mean}; a smaller lr than {config.lr:g} may help")
        record = Epoch(number, mean, self._accuracy(), seconds, losses)
        if config.save is not None:
            write_checkpoint(config.save, self._settings, self.engine.state_dict(), [*self.epochs, record])
        self.epochs.append(record)
        words = f"loss {mean:.4f}  accuracy {record.accuracy:.2%}  {count / seconds:,.0f} images/s"
        self._print(f"epoch {number}/{config.epochs}  {words}")

    def _train(self, number: int) -> tuple[float, list[float]]:
        """Make the steps of one epoch. Return their seconds, and the mean loss of each batch."""
        train = self.digits.train
        self.net.train()
        begin = time.perf_counter()
        order = epoch_order(train.count, self.config.seed, number).to(self.devices[0])
        losses = [self.engine(images, labels) for images, labels in train.batches(order, self.config.batch)]
        self.engine.flush()
        # Reading the losses waits for the device, so the clock is read after the work and not after its launch.
        step_losses = torch.stack(losses).tolist()
        return time.perf_counter() - begin, step_losses

    def _accuracy(self) -> float:
        test = self.digits.test
        self.net.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self.devices[0])
        for images, labels in test.batches(torch.arange(test.count, device=self.devices[0]), TEST_BATCH):
            _, outputs = self.engine.evaluate(images, labels, return_outputs=True)
            correct += (outputs.argmax(1) == labels).sum()
        return int(correct) / test.count


def train(config: Config, *, digits: Digits | None = None, verbose: bool = False) -> Training:
    """Prepare and run a training, and return it; arguments and errors are those of `Training` and its `run`."""
    return Training(config, digits=digits, verbose=verbose).run()


def run(args: argparse.Namespace) -> int:
    """Train as `args` ask, with lines on stdout. Return the exit status.

    It is 0, or 1 if the machine failed or the loss is no longer finite, or 130 at Ctrl-C, with a line on stderr. A
    request that cannot be served raises the errors of `Training`, which `mgpu_core.tools.cli` tells with the status 2.
    """
    # cuDNN may else sum a weight's gradient in the order of arrival, and a resumed run would not give the same bits.
    torch.backends.cudnn.deterministic = True
    config = Config(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Config)})
    training = Training(config, verbose=True)
    try:
        training.run()
        return 0
    except KeyboardInterrupt:
        status, reason = 130, "interrupted"
    except (OSError, FloatingPointError, Error) as error:
        status, reason = 1, str(error)
    print(f"mgpu mnist: error: {reason}; epochs done: {len(training.epochs)}", file=sys.stderr)
    return status
