"""Runs the cases of a GPU one after another in one process: `python bench.py RESULTS [--seconds N]`.

Starting Python and torch once instead of once per case saves a minute. Exit status: 0 done; 1 a wrong value, or a case
that failed. Bounds are printed, and a missed one fails nothing.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

# The clone, last: an installed mgpu_core comes before the sources beside us, which may not be built.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks import run
from benchmarks.ladder import run as ladder
from mgpu_core.tools.bench import cases

KERNELS = ("scale_cast", "pack", "sum_ranks", "sgd", "adamw", "unpack", "l2_norm")
Main = Callable[[Sequence[str]], int]


def commands(results: Path) -> dict[str, tuple[Main, list[str]]]:
    """By name who runs a case, and with which arguments; the cases in the order of their worth."""
    found: dict[str, tuple[Main, list[str]]] = {}
    for name in KERNELS:
        # Without cupy's and numba's twins, which compile for longer than they run.
        found[name] = run.main, [name, "--device", "cuda", "--peers", ",".join(cases.load(name).peers)]
    found["train_step"] = run.main, ["train_step", "--device", "cuda", "--peers", "bare,torch", "--model", "simplenet"]
    found["ladder"] = ladder.main, ["all"]
    return {
        name: (main, [*arguments, "--json", str(results / f"{name}.json")]) for name, (main, arguments) in found.items()
    }


def run_all(runs: Mapping[str, Callable[[], int]], seconds: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Run the cases in order, and start none after the given seconds. Return 1 if a case did not return 0, else 0."""
    end, status = clock() + seconds, 0
    for name, each in runs.items():
        print(f"== {name}", flush=True)
        if clock() > end:
            print("not run: no time was left", flush=True)
            continue
        try:
            failed = each() != 0
        except (Exception, SystemExit):
            traceback.print_exc()
            failed = True
        status |= failed
    return int(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no case is begun")
    options = parser.parse_args(arguments)
    runs = {name: partial(case, line) for name, (case, line) in commands(options.results).items()}
    return run_all(runs, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
