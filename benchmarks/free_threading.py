"""Compare a training step with the GIL and without it: many small layers on two CPU ranks, `workers="threads"`.

    python benchmarks/free_threading.py --rounds 5  # by a free-threaded Python, 3.14t for example

Each round starts two children of this interpreter in turn, one with PYTHON_GIL=1 and one with PYTHON_GIL=0. A step
counts if its threads waited for a core for less than 5 % of its time, so that other work on the machine does not
decide. Linux tells that in /proc; elsewhere all steps count.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

CLEAN = 0.05  # of a step's time: the most that its threads may have waited for a core
WARM_UP = 30  # steps that are not measured


def main() -> int:
    """Parse the command line, run the children and print a table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="children of each kind (default: 5)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each child (default: 5)")
    parser.add_argument("--layers", type=int, default=200, help="of Linear(8, 8) (default: 200)")
    parser.add_argument("--rows", type=int, default=16, help="of a batch (default: 16)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(list(_steps(options))))
        return 0
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        print("this Python always has the GIL: use a free-threaded build", file=sys.stderr)
        return 2
    found: dict[str, list[tuple[float, float]]] = {"1": [], "0": []}
    print("round  PYTHON_GIL  clean steps  median ms")
    for number in range(options.rounds):
        for gil in ("1", "0") if number % 2 else ("0", "1"):
            steps = _child(gil)
            found[gil] += steps
            print(f"{number:5}  {gil:>10}  {_text(steps)}", flush=True)
    for gil, steps in found.items():
        print(f"  all  {gil:>10}  {_text(steps)}")
    with_gil, without = (_clean(found[gil]) for gil in ("1", "0"))
    if with_gil and without:
        print(f"without the GIL {median(with_gil) / median(without):.2f} times as fast (ratio of medians)")
    return 0


def _child(gil: str) -> list[tuple[float, float]]:
    command = [sys.executable, *sys.argv, "--child"]
    environ = {**os.environ, "PYTHON_GIL": gil}
    ran = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return [(seconds, waited) for seconds, waited in json.loads(ran.stdout)]


def _clean(steps: list[tuple[float, float]]) -> list[float]:
    return [seconds for seconds, waited in steps if waited < CLEAN * seconds]


def _text(steps: list[tuple[float, float]]) -> str:
    clean = _clean(steps)
    return f"{len(clean):5} of {len(steps):<4}  {1e3 * median(clean):9.2f}" if clean else f"    0 of {len(steps)}"


def _steps(options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Yield of each step its seconds, and the seconds that threads of this process waited for a core."""
    import torch

    from mgpu_core import TrainStep, optim

    torch.set_num_threads(2)  # one for each rank
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(options.layers)])
    sgd = optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    step = TrainStep(net, torch.nn.functional.mse_loss, sgd, ["cpu"] * 2, workers="threads")
    x, y = torch.randn(options.rows, 8), torch.randn(options.rows, 8)
    for _ in range(WARM_UP):
        step(x, y)
    until = time.perf_counter() + options.seconds
    while time.perf_counter() < until:
        waited, begin = _waited(), time.perf_counter()
        step(x, y)
        seconds = time.perf_counter() - begin
        yield seconds, _waited() - waited


def _waited() -> float:
    """Return the seconds that the threads of this process have been ready to run, and had no core."""
    return sum(int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")) / 1e9


if __name__ == "__main__":
    sys.exit(main())
