"""The command `mgpu`: one word a habit.

Each command is a module with `add_arguments` and `run`, imported only when chosen. A mistake of the caller and a
failure of the machine end in a line on stderr and status 2; only a defect of ours shows a traceback.
"""

import argparse
import importlib
import importlib.metadata
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

from mgpu_core.errors import Error
from mgpu_core.support.extras import MissingExtra


class Command(NamedTuple):
    """The module of a word, its line in the help, and the exit status if the reader of the output leaves early."""

    module: str
    help: str
    unread: int = 0

    def load(self) -> ModuleType:
        """Import the module."""
        return importlib.import_module(f"mgpu_core.tools.{self.module}")


COMMANDS = {
    "advise": Command("advise.command", "measure one device against many on a script's model, and say what to take"),
    "bench": Command("bench.command", "measure collectives, kernels and training steps against their peers"),
    "doctor": Command("doctor", "say what this machine offers, what will happen on it, and what is wrong"),
    "explain": Command("explain.command", "run a script, and show what its steps did: who moved what, when"),
    "lesson": Command("lessons.command", "learn how it works: pages whose code runs, with exercises", 1),
    "mnist": Command("mnist.train", "train the MNIST reference on whatever there is", 1),
    "run": Command("run.command", "run a script that uses torch.nn.DataParallel unchanged, on ours"),
    "simulate": Command("explain.simulate", "predict a recorded step at numbers of GPUs that you do not have"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the answer is the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show ends no training
    try:
        return _run(_parsed(words))
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    try:
        with warnings_without_line(args.command):
            status = int(COMMANDS[args.command].load().run(args))
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
    parser, own = _parsers(words[0])
    args, unknown = parser.parse_known_args(words)
    if unknown:
        own.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _parsers(chosen: str) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the whole parser, in which the chosen command alone knows its options; and that command's own."""
    parser = argparse.ArgumentParser(prog="mgpu", description="Several GPUs in one Python process.")
    parser.add_argument("--version", action="version", version=f"mgpu_core {importlib.metadata.version('mgpu-core')}")
    own = parser
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.help, description=command.help)
        if name == chosen:
            own = added
            command.load().add_arguments(added)
    return parser, own


def _in_two_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:2]) or type(error).__name__
