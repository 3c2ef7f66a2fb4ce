"""`mgpu explain script.py`: run an unmodified script, and show its steps.

The script's own output and exit status come through; the trace follows, also after an error.
"""

import argparse
import os
import sys
from pathlib import Path

from mgpu_core.support.files import check_outputs, write_whole
from mgpu_core.support.tables import show
from mgpu_core.tools.explain.recorder import explain
from mgpu_core.tools.explain.trace import Trace
from mgpu_core.tools.user_script import note_order, script_status, uses_torchs_wrapper

__all__ = ["run"]

_OPTIONS = ("--html", "--trace", "--profile", "--skip", "--steps")


def run(args: argparse.Namespace) -> int:
    """Run the script and print the table of its last step.

    Returns:
        The script's exit status; 1 after an error in it, or if there was nothing to record; 2 if a file of ours is not
        written.
    """
    if not args.script.is_file():
        raise FileNotFoundError(f"{args.script}: there is no such script")
    check_outputs([path for path in (args.html, args.trace, args.profile) if path], [args.script])
    here = Path.cwd()  # the script may go to another folder
    if args.arguments[:1] == ["--"]:
        del args.arguments[0]
    note_order("mgpu explain", _OPTIONS, args.arguments)
    noted = uses_torchs_wrapper(args.script)
    if noted:
        print(_not_recorded(args.script), file=sys.stderr)
    process = os.getpid()
    with explain(skip=args.skip, steps=args.steps) as trace:
        status = script_status(args.script, args.arguments)
    if os.getpid() != process:  # a child that the script has forked came out here; the trace is its parent's
        return status
    if not trace.steps:
        print(
            f"mgpu explain: error: nothing was recorded{'' if status or noted else _why_nothing(args)}", file=sys.stderr
        )
        return status or 1
    return status if _save(trace, here, args) else 2


def _not_recorded(script: Path) -> str:
    return (
        f"mgpu explain: note: {script} uses torch.nn.DataParallel, which is not recorded: mgpu_core.DataParallel is, "
        "and `mgpu run --explain FILE.html` puts it in the place of torch's"
    )


def _why_nothing(args: argparse.Namespace) -> str:
    """Return why a script that ended well left no step."""
    wrappers = "DataParallel, TrainStep, Pipeline, TensorParallel or place"
    what = f"whole step with mgpu_core's {wrappers}, no batch of a Predictor"
    if not args.skip:
        return f": {args.script} makes no {what}, and no functional call"
    return (
        f": {args.script} ended within its first {args.skip} steps, or makes no {what}; --skip 0 keeps the first "
        "steps, and functional calls"
    )


def _save(trace: Trace, here: Path, args: argparse.Namespace) -> bool:
    """Write the files that are wanted, named as seen from ``here``; show the last step, and say so.

    The training is over: each file is tried, whatever became of the others.

    Returns:
        Whether all are written.
    """

    def save_profile(path: Path) -> None:
        text = trace.profile(name=args.script.stem).to_json()
        write_whole(path, lambda file: file.write(text.encode()))

    wanted = ((args.html, trace.save_html), (args.trace, trace.save_trace), (args.profile, save_profile))
    written, failed = [], []
    for path, save in wanted:
        if path is not None:
            try:
                save(here / path)
                written.append(path)
            except (OSError, ValueError) as error:
                failed.append(f"{path}: {error}")
    show(["", *trace.lines()])
    for path in written:
        print(f"written: {path}")
    for line in failed:
        print(f"mgpu explain: error: {line}", file=sys.stderr)
    return not failed
