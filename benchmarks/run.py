"""Runs one case, or draws the results again: `python benchmarks/run.py --list` says what there is.

Exit status: 0 done; 1 a wrong value, a peer that failed, or with `--check` a missed bound; 2 a request that cannot be
served; 130 interrupted. The table goes to stdout, the progress to stderr.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

# The folder above, last: an installed mgpu_core comes before the sources beside us, which may not be built.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import cases
from benchmarks.case import Case, Row, UsageError, Verdict, describe
from benchmarks.environment import environment, header
from benchmarks.gloo import PeerFailed
from benchmarks.options import OneLineParser, names_among, parse_count, parse_png
from benchmarks.plot import draw
from benchmarks.report import RESULTS, render, report_machine
from benchmarks.result import Result
from benchmarks.timing import OURS, WrongResult, median
from mgpu_core.extras import require
from mgpu_core.files import check_writable


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and does what it asks; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.do(options)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (WrongResult, PeerFailed) as error:
        return _fail(error, 1)
    except (UsageError, OSError, ImportError) as error:
        return _fail(error, 2)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="run.py", description="Benchmarks of mgpu_core against its peers.")
    parser.add_argument("--list", action=_List, nargs=0, help="name the cases and their peers")
    commands = parser.add_subparsers(metavar="CASE", required=True, dest="command")
    for name in cases.NAMES:
        case = cases.load(name)
        _add_options(commands.add_parser(name, help=case.summary, description=case.summary), case)
    report = commands.add_parser("report", help="draw the tables and pictures of results/<machine>/ again")
    report.add_argument("machines", nargs="*", metavar="MACHINE", help="folders of the results (default: all)")
    report.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help=argparse.SUPPRESS)
    report.set_defaults(do=_report)
    return parser


def _add_options(parser: argparse.ArgumentParser, case: Case) -> None:
    known = (*case.peers, *case.more_peers)
    add = parser.add_argument
    add("--peers", type=names_among(known), default=list(case.peers), metavar="LIST", help=f"of {', '.join(known)}")
    add("--repeats", type=parse_count, default=case.repeats, metavar="N", help="rounds (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every sample")
    add("--plot", type=parse_png, metavar="FILE.png", help="draw a picture")
    add("--check", action="store_true", help="exit with 1 if a bound of this case is missed")
    case.add_arguments(parser)
    parser.set_defaults(do=lambda options: _run(case, options))


def _run(case: Case, options: argparse.Namespace) -> int:
    for path in filter(None, (options.json, options.plot)):
        check_writable(path)
    if options.plot is not None:
        require("matplotlib", "a picture")
    rows, facts = [], environment()
    # Closed at once when something goes wrong: a case may hold processes and folders.
    with contextlib.closing(case.measure(options)) as measured:
        print(f"# {case.name}: {case.summary}\n\n{header(facts)}\n", flush=True)
        for row in measured:
            print(_progress(row), file=sys.stderr, flush=True)
            rows.append(row)
    result = Result.of(case, facts, rows)
    print(render(result), flush=True)
    if options.json is not None:
        result.write(options.json)
    if options.plot is not None:
        draw(result, options.plot)
    return _check(result.verdicts) if options.check else 0


def _progress(row: Row) -> str:
    ratios = "".join(f", {ratio:.2f} x {peer}" for peer, ratio in row.ratios().items())
    return f"{describe(row.labels)}: {median(row.seconds[OURS]) * 1e3:.3f} ms{ratios}"


def _check(verdicts: Sequence[Verdict]) -> int:
    missed = [verdict.text for verdict in verdicts if verdict.held is False]
    if missed:
        return _fail(f"missed {len(missed)} of {len(verdicts)} bounds: {'; '.join(missed)}", 1)
    # A check that looked at nothing must not pass for one that found nothing.
    if verdicts and all(verdict.held is None for verdict in verdicts):
        return _fail("--check: no row of this run has a bound", 1)
    return 0


def _report(options: argparse.Namespace) -> int:
    folders = [options.results / name for name in options.machines]
    if not folders and options.results.is_dir():
        folders = sorted(folder for folder in options.results.iterdir() if folder.is_dir())
    if not folders:
        raise UsageError(f"{options.results}: no folder of a machine here")
    for folder in folders:
        print(report_machine(folder), flush=True)
    return 0


class _List(argparse.Action):
    """Prints the cases and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for name in cases.NAMES:
            case = cases.load(name)
            more = "".join(f", ({peer})" for peer in case.more_peers)
            print(f"{name:17} {case.summary}; peers: {', '.join(case.peers)}{more}")
        parser.exit()


def _fail(reason: object, status: int) -> int:
    print(f"run.py: error: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
