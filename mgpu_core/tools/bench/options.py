"""The options of `mgpu bench`, and their types: sizes, lists, and a parser whose errors are one line.

A case, which needs torch, is imported once it is chosen: the help on all of them is there at once.

Sizes are binary as in nccl-tests: 64M is 64 MiB. Rates (in the tables) are decimal: 1 GB is 10^9 bytes.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mgpu_core.tools.bench import cases
from mgpu_core.tools.bench.titles import TITLES

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


SLOWER_PERCENT = 10.0

RANKS_TEXT = "how many CPU ranks, or ranks on GPUs with --device cuda"

_TABLE = "Print one Markdown table per case, with a line for each file that --json has written and each of its rows."


def add_arguments(parser: argparse.ArgumentParser) -> "argparse._SubParsersAction[Any]":
    """Add the cases and `table`; return the sub-commands, to which others may be added."""
    parser.set_defaults(prog=parser.prog)
    parser.add_argument("--list", action=_List, nargs=0, help="name the cases and their peers")
    commands = parser.add_subparsers(metavar="CASE", required=True, dest="case")
    for name, title in TITLES.items():
        _when_chosen(commands.add_parser(name, help=title), partial(_add_options, name))
    table = commands.add_parser("table", help="results of several machines in one table", description=_TABLE)
    table.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="written by --json")
    return commands


def _when_chosen(parser: argparse.ArgumentParser, add_options: Callable[[argparse.ArgumentParser], object]) -> None:
    """Add the options of a sub-command when its words are parsed, and not before."""
    parse = parser.parse_known_args

    def parse_known_args(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        add_options(parser)
        return parse(args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _add_options(name: str, parser: argparse.ArgumentParser) -> None:
    case = cases.load(name)
    parser.description = case.summary
    known = (*case.peers, *case.more_peers)
    add = parser.add_argument
    add("--peers", dest="named", type=names_among(known), default=[], metavar="LIST", help=f"of {', '.join(known)}")
    add("--repeats", type=parse_count, default=case.repeats, metavar="N", help="rounds (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every sample")
    add("--plot", type=parse_png, metavar="FILE.png", help="draw a picture")
    add("--check", action="store_true", help="exit with 1 if a bound of this case is missed")
    add("--baseline", type=Path, metavar="FILE.json", help="exit with 1 if a row is slower than there")
    text = "allowed with --baseline (default: %(default)g)"
    add("--slower", type=float, default=SLOWER_PERCENT, metavar="PERCENT", help=text)
    case.add_arguments(parser)


class _List(argparse.Action):
    """Print the cases and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for name in TITLES:
            case = cases.load(name)
            more = "".join(f", ({peer})" for peer in case.more_peers)
            print(f"{name:17} {case.summary}; peers: {', '.join(case.peers)}{more}")
        parser.exit()


class OneLineParser(argparse.ArgumentParser):
    """Exit status 2 and one line on stderr; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_nbytes(text: str) -> int:
    """`"64M"` to 67108864."""
    match = re.fullmatch(r"([1-9][0-9]{0,15})([KMG]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512, 64K, 256M or 1G")
    return int(match[1]) << _UNITS[match[2]]


def parse_sizes(text: str) -> list[int]:
    """`"1K:256M"` to 1 KiB, 2 KiB, ... 256 MiB; `"1K,64M"` to these two."""
    sizes = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        sizes.append(parse_nbytes(first))
        limit = parse_nbytes(last) if colon else sizes[-1]
        if limit < sizes[-1]:
            raise argparse.ArgumentTypeError(f"{part!r} begins with the larger size")
        while sizes[-1] * 2 <= limit:
            sizes.append(sizes[-1] * 2)
    return sizes


def parse_counts(text: str) -> list[int]:
    """`"2,4,8"` to whole numbers above 0."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,8}", part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0, such as 2,4,8")
    return [int(part) for part in parts]


def parse_count(text: str) -> int:
    """`"10"` to a whole number above 0."""
    (count, *more) = parse_counts(text)
    if more:
        raise argparse.ArgumentTypeError(f"{text!r} is more than one number")
    return count


def names_among(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a parser of lists of distinct names: `"gloo,torch"`."""

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return parse


def parse_png(text: str) -> Path:
    """Return the name of a picture."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return Path(text)


def add_counts(parser: argparse.ArgumentParser, **counts: tuple[int, str]) -> None:
    """Add options that are whole numbers above 0: by name the default, and a text."""
    for name, (default, text) in counts.items():
        text = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=parse_count, default=default, metavar="N", help=text)


def add_ranks(parser: argparse.ArgumentParser, default: str) -> None:
    """`--ranks`, for the cases that have them."""
    text = f"{RANKS_TEXT} (default: %(default)s)"
    parser.add_argument("--ranks", type=parse_counts, default=default, metavar="LIST", help=text)
