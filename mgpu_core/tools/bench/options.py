"""The command line's own types: sizes, lists, and a parser whose errors are one line.

Sizes are binary as in nccl-tests: 64M is 64 MiB. Rates (in the tables) are decimal: 1 GB is 10^9 bytes.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


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


def add_ranks(parser: argparse.ArgumentParser, default: str) -> None:
    """`--ranks`, for the cases that have them."""
    parser.add_argument(
        "--ranks", type=parse_counts, default=default, metavar="LIST", help="how many ranks (default: %(default)s)"
    )
