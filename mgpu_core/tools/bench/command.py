"""`mgpu bench CASE`: a benchmark against its peers; `mgpu bench table`: results of several machines in one table.

Exit status: 0 done; 1 a wrong value, a peer that failed, a missed bound with `--check`, or a slower row with
`--baseline`; 2 a request that cannot be served. The table goes to stdout, the progress to stderr.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_core.support.extras import require
from mgpu_core.support.files import check_writable
from mgpu_core.tools.bench import cases
from mgpu_core.tools.bench.baseline import slower_rows
from mgpu_core.tools.bench.case import Case, Row, Verdict, describe
from mgpu_core.tools.bench.environment import environment, header
from mgpu_core.tools.bench.gloo import PeerFailed
from mgpu_core.tools.bench.options import names_among, parse_count, parse_png
from mgpu_core.tools.bench.plot import draw
from mgpu_core.tools.bench.report import compare, render
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.bench.timing import OURS, WrongResult, median

__all__ = ["add_arguments", "run"]

SLOWER_PERCENT = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> "argparse._SubParsersAction[Any]":
    """Add the cases and `table`; return the sub-commands, to which others may be added."""
    parser.set_defaults(prog=parser.prog)
    parser.add_argument("--list", action=_List, nargs=0, help="name the cases and their peers")
    commands = parser.add_subparsers(metavar="CASE", required=True, dest="case")
    for name in cases.NAMES:
        case = cases.load(name)
        _add_options(commands.add_parser(name, help=case.summary, description=case.summary), case)
    table = commands.add_parser("table", help="results of several machines in one table", description=_TABLE)
    table.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="written by --json")
    table.set_defaults(do=_table)
    return commands


_TABLE = "Print one Markdown table per case, with a line for each file that --json has written and each of its rows."


def run(args: argparse.Namespace) -> int:
    """Run the chosen case or command; the answer is the exit status.

    Raises:
        UsageError, OSError, MissingExtra: a request that cannot be served.
    """
    try:
        status: int = args.do(args)
        return status
    except (WrongResult, PeerFailed) as error:
        return _fail(args, str(error))


def _add_options(parser: argparse.ArgumentParser, case: Case) -> None:
    known = (*case.peers, *case.more_peers)
    add = parser.add_argument
    add("--peers", type=names_among(known), default=list(case.peers), metavar="LIST", help=f"of {', '.join(known)}")
    add("--repeats", type=parse_count, default=case.repeats, metavar="N", help="rounds (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every sample")
    add("--plot", type=parse_png, metavar="FILE.png", help="draw a picture")
    add("--check", action="store_true", help="exit with 1 if a bound of this case is missed")
    add("--baseline", type=Path, metavar="FILE.json", help="exit with 1 if a row is slower than there")
    add(
        "--slower", type=float, default=SLOWER_PERCENT, metavar="PERCENT",
        help="allowed with --baseline (default: %(default)g)",
    )  # fmt: skip
    case.add_arguments(parser)
    parser.set_defaults(do=lambda args: _run(case, args))


def _run(case: Case, args: argparse.Namespace) -> int:
    for path in filter(None, (args.json, args.plot)):
        check_writable(path)
    if args.plot is not None:
        require("matplotlib", "a picture")
    baseline = None if args.baseline is None else Result.read(args.baseline)
    rows, facts = [], environment()
    # Closed at once when something goes wrong: a case may hold processes and folders.
    with contextlib.closing(case.measure(args)) as measured:
        print(f"# {case.name}: {case.summary}\n\n{header(facts)}\n", flush=True)
        try:
            for row in measured:
                print(_progress(row), file=sys.stderr, flush=True)
                rows.append(row)
        except KeyboardInterrupt:
            if rows:
                _show(Result.of(case, facts, rows), args)
            raise
    result = Result.of(case, facts, rows)
    _show(result, args)
    status = _check(args, result.verdicts) if args.check else 0
    if baseline is not None and (slower := slower_rows(result, baseline, args.slower)):
        status = _fail(args, f"slower than {args.baseline} by more than {args.slower:g} %: {'; '.join(slower)}")
    return status


def _show(result: Result, args: argparse.Namespace) -> None:
    """Print the table, and write what was asked for."""
    print(render(result), flush=True)
    if args.json is not None:
        result.write(args.json)
    if args.plot is not None:
        draw(result, args.plot)


def _progress(row: Row) -> str:
    ratios = "".join(f", {ratio:.2f} x {peer}" for peer, ratio in row.ratios().items())
    return f"{describe(row.labels)}: {median(row.seconds[OURS]) * 1e3:.3f} ms{ratios}"


def _check(args: argparse.Namespace, verdicts: Sequence[Verdict]) -> int:
    missed = [verdict.text for verdict in verdicts if verdict.held is False]
    if missed:
        return _fail(args, f"missed {len(missed)} of {len(verdicts)} bounds: {'; '.join(missed)}")
    # A check that looked at nothing must not pass for one that found nothing.
    if verdicts and all(verdict.held is None for verdict in verdicts):
        return _fail(args, "--check: no row of this run has a bound")
    return 0


def _table(args: argparse.Namespace) -> int:
    print(compare([Result.read(path) for path in args.files]))
    return 0


class _List(argparse.Action):
    """Print the cases and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for name in cases.NAMES:
            case = cases.load(name)
            more = "".join(f", ({peer})" for peer in case.more_peers)
            print(f"{name:17} {case.summary}; peers: {', '.join(case.peers)}{more}")
        parser.exit()


def _fail(args: argparse.Namespace, reason: str) -> int:
    print(f"{args.prog}: error: {reason}", file=sys.stderr)
    return 1
