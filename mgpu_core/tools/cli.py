"""The command `mgpu`: one word a habit.

The module of a command, with its function `run`, is imported once its options are right: help and usage need no torch.
A mistake of the caller and a failure of the machine end in a line on stderr and status 2; only a defect of ours shows
a traceback.
"""

import argparse
import importlib
import importlib.metadata
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from mgpu_core.errors import Error
from mgpu_core.support.extras import MissingExtra
from mgpu_core.support.interrupts import on_ctrl_c
from mgpu_core.tools import options
from mgpu_core.tools.bench.options import add_arguments as bench_options


class Command(NamedTuple):
    """A word's options, module and line in the help, and the exit status if the reader of the output leaves early."""

    add_options: Callable[[argparse.ArgumentParser], object]
    module: str
    help: str
    unread: int = 0

    def run(self, args: argparse.Namespace) -> int:
        """Import the module and run the command."""
        with on_ctrl_c(lambda: os._exit(130)):
            module = importlib.import_module(f"mgpu_core.tools.{self.module}")
        return int(module.run(args))


COMMANDS = {
    "advise": Command(options.advise, "advise.command", "measure one device against many on your model"),
    "bench": Command(bench_options, "bench.command", "measure collectives, kernels and steps against their peers"),
    "doctor": Command(
        options.doctor, "doctor", "say what this machine offers, what will happen on it, and what is wrong"
    ),
    "explain": Command(options.explain, "explain.command", "run a script, and show who moved what, when, in its steps"),
    "lesson": Command(options.lesson, "lessons.command", "learn how it works: pages whose code runs, exercises", 1),
    "mnist": Command(options.mnist, "mnist.train", "train the MNIST reference on whatever there is", 1),
    "run": Command(options.run, "run.command", "run a script that uses torch.nn.DataParallel unchanged, on ours"),
    "simulate": Command(options.simulate, "explain.simulate", "predict a recorded step on GPUs that you do not have"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the answer is the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show ends no training
    try:
        with on_ctrl_c(lambda: os._exit(130)):  # while torch is imported: some of its modules swallow the exception
            args = _parsed(words)
        return _run(args)
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    try:
        with warnings_without_line(args.command):
            status = COMMANDS[args.command].run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has left, as in `mgpu doctor | head -1`; without this, Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COMMANDS[args.command].unread
    except (ValueError, OSError, Error, MissingExtra) as error:
        print(f"mgpu {args.command}: error: {_in_two_lines(error)}", file=sys.stderr)
        return 2


@contextmanager
def warnings_without_line(command: str) -> Iterator[None]:
    """Leave the source line out of warnings that point at the entry point: no line of the user's has caused them."""
    entry, default = {sys.argv[0], "<frozen runpy>"}, warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename in entry:
            return f"mgpu {command}: warning: {message}\n"
        return default(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = default


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words; an unknown one is an error with the usage of the chosen command."""
    if words in ([], ["bench"], ["lesson"]):  # no word yet: the help, and not an error
        words = [*words, "--help"]
    parser = argparse.ArgumentParser(prog="mgpu", description="Several GPUs in one Python process.")
    parser.add_argument("--version", action="version", version=f"mgpu_core {importlib.metadata.version('mgpu-core')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        command.add_options(commands.add_parser(name, help=command.help, description=command.help))
    args, unknown = parser.parse_known_args(words)
    if unknown:
        commands.choices.get(words[0], parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _in_two_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:2]) or type(error).__name__
