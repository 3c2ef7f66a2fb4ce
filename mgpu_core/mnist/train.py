"""`mgpu mnist`, the reference training as a command.

`add_arguments` defines the options, `run` trains and returns the exit status: 0 done, 1 the machine failed
or the loss is no longer finite, 2 the request cannot be served, 130 interrupted. A failure is told in a line on
stderr, without a traceback, and leaves no half-written file; a traceback is a bug.
"""

import argparse
import os
import sys
from pathlib import Path

from mgpu_core.errors import Error
from mgpu_core.mnist.config import AMP_DTYPES, ENGINES, Config
from mgpu_core.mnist.devices import parse_device_ids, parse_shares
from mgpu_core.mnist.loop import Training, train
from mgpu_core.mnist.model import MODELS
from mgpu_core.mnist.report import ConsoleReport

__all__ = ["add_arguments", "run", "train"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training to `parser`; `run` takes the result."""
    add = parser.add_argument
    add("--model", choices=list(MODELS), default=Config.model, help="the network (default: %(default)s)")
    add(
        "--engine",
        choices=list(ENGINES),
        default=Config.engine,
        help="mgpu_core.TrainStep (default), mgpu_core.DataParallel, or the bare network",
    )
    add("--device-ids", metavar="LIST", help="one entry per rank: 0,1 or cuda:1 or cpu,cpu (default: all GPUs)")
    add("--ranks", type=int, metavar="N", help="the first N GPUs; without any, N ranks on the CPU (default there: 2)")
    add("--shares", metavar="LIST", help="rows in this proportion, one number per rank: 2,1 (default: equal parts)")
    add("--batch", type=int, default=Config.batch, metavar="N", help="rows per step (default: %(default)s)")
    add(
        "--accumulate",
        type=int,
        default=Config.accumulate,
        metavar="K",
        help="batches per update (default: %(default)s)",
    )
    add("--amp", choices=list(AMP_DTYPES), help="forward in this dtype, by the step engine (default: full precision)")
    add("--capture", action="store_true", help="whole steps of the step engine as CUDA graphs")
    add("--lr", type=float, default=Config.lr, metavar="X", help="step length of SGD (default: %(default)s)")
    add(
        "--epochs", type=int, default=Config.epochs, metavar="N", help="in all, resumed ones too (default: %(default)s)"
    )
    add("--seed", type=int, default=Config.seed, metavar="N", help="weights and order (default: %(default)s)")
    add("--data", default=Config.source, metavar="SOURCE", help="builtin, download or a folder with MNIST's files")
    add("--save", type=Path, metavar="FILE", help="write a checkpoint after each epoch")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint, bit for bit")
    add("--plot", type=Path, metavar="FILE.png", help="draw the curves at the end")
    add("--explain", type=Path, metavar="FILE.html", help="write a page that plays some of the steps")
    add("--json", type=Path, metavar="FILE", help="write settings, curves and counters at the end")


def run(args: argparse.Namespace) -> int:
    """Train as `args` ask, with lines on stdout and a progress bar on stderr. Returns the exit status."""
    try:
        training = Training(_config(args), report=ConsoleReport())
    except KeyboardInterrupt:
        return _fail("interrupted before the first step", 130)
    except (ValueError, OSError, ImportError) as error:
        return _fail(error, 2)
    except Error as error:
        return _fail(error, 1)
    try:
        training.run()
    except KeyboardInterrupt:
        return _fail(f"interrupted; {_kept(training)}", 130)
    except BrokenPipeError:
        # The reader of stdout has left (`mgpu mnist | head -1`); without this Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(f"the reader of the output has left; {_kept(training)}", 1)
    except (OSError, FloatingPointError, Error) as error:
        return _fail(f"{error}; {_kept(training)}", 1)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """`python -m mgpu_core.mnist`: the same as `mgpu mnist`."""
    parser = argparse.ArgumentParser(prog="python -m mgpu_core.mnist", description="Train the MNIST reference.")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def _config(args: argparse.Namespace) -> Config:
    return Config(
        model=args.model,
        engine=args.engine,
        device_ids=None if args.device_ids is None else parse_device_ids(args.device_ids),
        ranks=args.ranks,
        shares=None if args.shares is None else parse_shares(args.shares),
        batch=args.batch,
        accumulate=args.accumulate,
        amp=args.amp,
        capture=args.capture,
        lr=args.lr,
        epochs=args.epochs,
        seed=args.seed,
        source=args.data,
        save=args.save,
        resume=args.resume,
        plot=args.plot,
        json=args.json,
        explain=args.explain,
    )


def _kept(training: Training) -> str:
    if training.saved_epochs == 0:
        return "nothing was saved"
    return f"{training.config.save} holds the training after epoch {training.saved_epochs}"


def _fail(reason: object, status: int) -> int:
    if isinstance(reason, OSError) and reason.filename is not None:
        reason = f"{reason.filename}: {reason.strerror}"
    print(f"mgpu mnist: error: {reason}", file=sys.stderr)
    return status
