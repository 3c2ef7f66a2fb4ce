"""The rungs in numba: kernels in Python, compiled for the GPU when they are first called, or run in numba's simulator.

`prepare` makes numba's arrays of the problem's tensors, chooses kernels and blocks, and returns what only launches.
"""

from collections.abc import Callable

from benchmarks.ladder.problems import Problem
from benchmarks.ladder.rungs import Unavailable

try:
    from benchmarks.ladder.numba_rungs import gather_rows, pack, sum_ranks
    from benchmarks.ladder.numba_rungs.launches import SIMULATED, context, ready
except ImportError as error:
    raise Unavailable(f"no numba: {error}") from error

_LAUNCHES: dict[str, Callable[..., list[tuple[object, int, tuple[object, ...]]]]] = {
    "pack": pack.launches,
    "sum_ranks": sum_ranks.launches,
    "gather_rows": gather_rows.launches,
}


def prepare(problem: Problem, rung: str) -> Callable[[], None]:
    """What runs the rung once on the problem's tensors.

    Raises:
        Unavailable: tensors of the CPU, and this process has not chosen the simulator.
    """
    if problem.device.type != "cuda" and not SIMULATED:
        raise Unavailable("numba needs a GPU, or its simulator: NUMBA_ENABLE_CUDASIM=1")
    with context(problem.device):
        launches = [ready(launch, problem.device) for launch in _LAUNCHES[problem.kernel](problem, rung) if launch[1]]

    def launch() -> None:
        with context(problem.device):
            for one in launches:
                one()

    return launch
