"""`mgpu bench CASE`: a benchmark against its peers; `mgpu bench table`: results of several machines in one table.

Exit status: 0 done; 1 a wrong value, a peer that failed, a missed bound with `--check`, or a slower row with
`--baseline`; 2 a request that cannot be served. The table goes to stdout, the progress to stderr.
"""

import argparse
import contextlib
import sys

from mgpu_core.support.busy import busy_note
from mgpu_core.support.extras import require
from mgpu_core.support.files import check_writable
from mgpu_core.support.progress import Progress
from mgpu_core.support.tables import show
from mgpu_core.tools.bench import cases
from mgpu_core.tools.bench.baseline import compared
from mgpu_core.tools.bench.case import Case, Row, RowPlan
from mgpu_core.tools.bench.environment import environment, header
from mgpu_core.tools.bench.gloo import PeerFailed
from mgpu_core.tools.bench.measure import measured
from mgpu_core.tools.bench.plot import draw
from mgpu_core.tools.bench.report import compare, lines_of
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.bench.timing import WrongResult

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Run the chosen case or command; the answer is the exit status.

    Raises:
        UsageError, OSError, MissingExtra: a request that cannot be served.
    """
    if args.case == "table":
        show(compare([Result.read(path) for path in args.files]))
        return 0
    try:
        return _run(cases.load(args.case), args)
    except (WrongResult, PeerFailed) as error:
        return _fail(args, str(error))


def _run(case: Case, args: argparse.Namespace) -> int:
    for path in filter(None, (args.json, args.plot)):
        check_writable(path)
    if args.plot is not None:
        require("matplotlib", "a picture")
    baseline = None if args.baseline is None else Result.read(args.baseline)
    args.peers = args.named or list(case.peers)
    plan, facts, rows = case.plan(args), environment(), list[Row]()
    print(f"# {case.name}: {case.summary}\n\n{header(facts)}\n", flush=True)
    try:
        _measure(plan, args, rows)
    except KeyboardInterrupt:
        _note(args, f"interrupted: {len(rows)} of {len(plan.labels)} rows are measured")
        if rows:
            _show(Result.of(case, facts, rows, checked=args.check), args)
        raise
    result = Result.of(case, facts, rows, checked=args.check)
    _show(result, args)
    checked = _check(args, case, result) if args.check else 0
    return max(checked, _compare(args, result, baseline) if baseline is not None else 0)


def _measure(plan: RowPlan, args: argparse.Namespace, rows: list[Row]) -> None:
    """Append the rows to `rows`, each when it is measured, and note what is special about them, once."""
    told = set[tuple[str, str]]()
    if note := busy_note():
        _note(args, f"{note}; rows are marked, and not judged")
    # Closed at once when something goes wrong: a case may hold processes and folders.
    with Progress(args.prog) as progress, contextlib.closing(measured(plan, progress)) as measuring:
        for row in measuring:
            rows.append(row)
            for peer in set(row.without.items()) - told:
                progress.hide()
                _note(args, "without {}: {}".format(*peer))
                told.add(peer)


def _show(result: Result, args: argparse.Namespace) -> None:
    """Print the table, and write what was asked for."""
    show(lines_of(result))
    if args.json is not None:
        result.write(args.json)
    if args.plot is not None:
        draw(result, args.plot)


def _check(args: argparse.Namespace, case: Case, result: Result) -> int:
    """Return 1 if a bound is missed, or if none could be judged: a check that looked at nothing must not pass."""
    missed = [verdict.text for verdict in result.verdicts if verdict.held is False]
    if missed:
        return _fail(args, f"missed {len(missed)} of {len(result.verdicts)} bounds: {'; '.join(missed)}")
    if case.bounds and all(verdict.held is None for verdict in result.verdicts):
        busy = any(verdict.busy for verdict in result.verdicts)
        why = "every row with a bound was measured on a busy machine" if busy else "no row of this run has a bound"
        return _fail(args, f"--check: {why}")
    return 0


def _compare(args: argparse.Namespace, result: Result, baseline: Result) -> int:
    """Return 1 if a row is slower than that of the baseline, or if no row could be judged."""
    verdicts = compared(result, baseline)
    slower = [f"{name} by {more:.0f} %" for name, more in verdicts.items() if more is not None and more > args.slower]
    if skipped := list(verdicts.values()).count(None):
        _note(args, f"{skipped} of {len(verdicts)} rows were not judged: the machine was busy, then or now")
    if slower:
        return _fail(args, f"slower than {args.baseline} by more than {args.slower:g} %: {'; '.join(slower)}")
    return _fail(args, f"--baseline {args.baseline}: no row was judged") if skipped == len(verdicts) else 0


def _note(args: argparse.Namespace, text: str) -> None:
    print(f"{args.prog}: note: {text}", file=sys.stderr, flush=True)


def _fail(args: argparse.Namespace, reason: str) -> int:
    print(f"{args.prog}: error: {reason}", file=sys.stderr)
    return 1
