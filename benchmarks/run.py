"""Runs one case, or draws the results again: `python benchmarks/run.py --list` says what there is.

The cases and all options are those of `mgpu bench`, and the studies and the kernels' twins in this folder; `report` is
about the results here.
Exit status: as of `mgpu bench`; 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# The folder above, last: an installed mgpu_core comes before the sources beside us, which may not be built.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from mgpu_core.tools.bench import cases, command, kernel_case
from mgpu_core.tools.bench.case import UsageError
from mgpu_core.tools.bench.options import OneLineParser, add_arguments
from mgpu_core.tools.bench.report import report_machine

RESULTS = Path(__file__).parent / "results"
STUDIES = {
    "mnist_epoch": "An epoch of MNIST",
    "explain_overhead": "The cost of recording a step",
}
TWINS = "cupy", "numba"
for _name, _title in STUDIES.items():
    cases.add(_name, _title, f"benchmarks.studies.{_name}")
for _name in TWINS:
    kernel_case.add_twin(_name, f"benchmarks.ladder.twins.{_name}_kernels")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and does what it asks; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _report(options) if options.case == "report" else command.run(options)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (UsageError, OSError, ImportError) as error:
        return _fail(error, 2)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="run.py", description="Benchmarks of mgpu_core against its peers.")
    report = add_arguments(parser).add_parser("report", help="draw the tables and pictures of the results again")
    report.add_argument("machines", nargs="*", metavar="MACHINE", help="folders of the results (default: all)")
    report.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help=argparse.SUPPRESS)
    return parser


def _report(options: argparse.Namespace) -> int:
    folders = [options.results / name for name in options.machines]
    if not folders and options.results.is_dir():
        folders = sorted(folder for folder in options.results.iterdir() if folder.is_dir())
    if not folders:
        raise UsageError(f"{options.results}: no folder of a machine here")
    for folder in folders:
        print(report_machine(folder), flush=True)
    return 0


def _fail(reason: object, status: int) -> int:
    print(f"run.py: error: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
