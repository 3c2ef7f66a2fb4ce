"""The ladder's command: checks the rungs, times them on a GPU, builds them, writes the README's table.

    python benchmarks/ladder/run.py [pack|sum_ranks|gather_rows|all] [--size 64M] [--languages cuda,cupy,numba]
    python benchmarks/ladder/run.py --check     every rung against the reference; without a GPU numba's, simulated
    python benchmarks/ladder/run.py build       nvcc's libraries into build/ladder
    python benchmarks/ladder/run.py readme      the tables of benchmarks/results/*/ladder.json into the README

Exit status: 0 done; 1 a wrong value; 2 a request that cannot be served, such as times without a GPU; 130 interrupted.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# The folder above, last: an installed mgpu_core comes before the sources beside us, which may not be built.
sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.ladder import check, cuda_library, languages, page
from benchmarks.ladder.languages import Prepare
from benchmarks.ladder.measure import measure
from benchmarks.ladder.problems import PackProblem
from benchmarks.ladder.rungs import KERNELS, LANGUAGES, Unavailable
from benchmarks.run import RESULTS
from mgpu_core.support.files import check_writable, write_whole
from mgpu_core.tools.bench.case import UsageError
from mgpu_core.tools.bench.environment import environment, header
from mgpu_core.tools.bench.options import OneLineParser, names_among, parse_count, parse_nbytes
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.bench.timing import WrongResult

SIMULATOR = "NUMBA_ENABLE_CUDASIM"
LONGEST = {"cuda": 20001, "cpu": 70}
"""Elements of a check's longest array: past several tiles of a GPU, or of a simulated one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and does what it asks; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _do(options)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except WrongResult as error:
        return _fail(error, 1)
    except (UsageError, Unavailable, OSError) as error:
        return _fail(error, 2)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="run.py", description="The ladder of kernels: naive, coalesced, vectorised, fused.")
    add = parser.add_argument
    add("what", nargs="?", choices=(*KERNELS, "all", "build", "readme"), default="all", help="default: %(default)s")
    add("--check", action="store_true", help="compare with the reference and measure nothing")
    add("--size", type=parse_nbytes, default="256M", metavar="BYTES", help="of the arrays (default: %(default)s)")
    add("--languages", type=names_among(LANGUAGES), metavar="LIST", help="default: all that are there")
    add("--repeats", type=parse_count, default=20, metavar="N", help="rounds (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every sample")
    add("--arch", default=cuda_library.ARCH, metavar="SM", help="of `build` (default: %(default)s)")
    add("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    return parser


def _do(options: argparse.Namespace) -> int:
    if options.what == "build":
        for kernel in KERNELS:
            print(cuda_library.build(kernel, options.arch), flush=True)
        return 0
    if options.what == "readme":
        text = page.filled(page.README.read_text(), page.readme(options.results))
        write_whole(page.README, lambda stream: stream.write(text.encode()))
        return 0
    return _check(options) if options.check else _measure(options)


def _measure(options: argparse.Namespace) -> int:
    device = languages.device()
    if device is None:
        raise UsageError("torch sees no GPU to measure on; `--check` compares the numba rungs in its simulator")
    if options.json is not None:
        check_writable(options.json)
    usable, facts = _usable(options, device), environment()
    print(f"# The ladder\n\n{header(facts)}\n", flush=True)
    rows = []
    for kernel in _kernels(options):
        print(f"{kernel} ...", file=sys.stderr, flush=True)
        rows.append(measure(kernel, options.size, usable, device, options.repeats))
        for rung, reason in rows[-1].without.items():
            print(f"without {rung}: {reason}", file=sys.stderr, flush=True)
    result = Result("ladder", "naive, coalesced, vectorised, fused", "us", page.FORMULA, facts, rows, [])
    print(page.render(result), flush=True)
    if options.json is not None:
        result.write(options.json)
    return 0


def _check(options: argparse.Namespace) -> int:
    """On the GPU all languages; without one numba alone, in a process that has its simulator."""
    device = languages.device()
    if device is None and os.environ.get(SIMULATOR) != "1":
        return _simulated(options)
    device = device or torch.device("cpu")
    missed = 0
    for language, prepare in _usable(options, device).items():
        for kernel, rung, wrong in check.check_all(prepare, _kernels(options), device, LONGEST[device.type]):
            print(f"{kernel}, {rung}, {language}: {'right' if not wrong else 'WRONG'}", *wrong, sep="\n  ", flush=True)
            missed += bool(wrong)
    if missed:
        raise WrongResult(f"{missed} rungs are wrong")
    return 0


def _simulated(options: argparse.Namespace) -> int:
    if options.languages not in (None, ["numba"]):
        raise UsageError("without a GPU only numba's rungs run, in its simulator")
    command = [sys.executable, "-P", str(Path(__file__).resolve()), options.what, "--check", "--languages", "numba"]
    print("no GPU: numba's rungs in its simulator", file=sys.stderr, flush=True)
    return subprocess.run(command, env={**os.environ, SIMULATOR: "1", "OMP_NUM_THREADS": "1"}).returncode


def _kernels(options: argparse.Namespace) -> Sequence[str]:
    return KERNELS if options.what == "all" else (options.what,)


def _usable(options: argparse.Namespace, device: torch.device) -> Mapping[str, Prepare]:
    """The languages that run here; one that was asked for by name must."""
    usable: dict[str, Prepare] = {}
    wanted = options.languages or (LANGUAGES if device.type == "cuda" else ["numba"])
    for language, found in languages.usable(wanted, PackProblem([8], device)).items():
        if not isinstance(found, Unavailable):
            usable[language] = found
        elif options.languages:
            raise found
        else:
            print(f"without {language}: {found}", file=sys.stderr, flush=True)
    if not usable:
        raise Unavailable("none of the languages can run here")
    return usable


def _fail(reason: object, status: int) -> int:
    print(f"run.py: error: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
