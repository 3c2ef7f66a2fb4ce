"""Every rung against the reference: odd counts, arrays that are not aligned, float32 and float16.

The same list of problems serves `run.py --check`, the tests, the simulator and a GPU. They are small: what matters is
each way through a rung, heads and tails and whole tiles, and a simulated thread takes a fraction of a millisecond.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch

from benchmarks.ladder.languages import Prepare
from benchmarks.ladder.problems import GatherProblem, PackProblem, Problem, SumProblem
from benchmarks.ladder.rungs import RUNGS

DTYPES = (torch.float32, torch.float16)
SHIFTS = ((0,), (1,), (0, 1))
"""All aligned; all off by one, so together; never together."""
COUNTS = (0, 1, 31, 0, 16, 5)


def problems(kernel: str, device: torch.device, longest: int) -> Iterator[tuple[str, Problem]]:
    """Problems of a kernel and what is special about each; one of their arrays has `longest` elements or more."""
    for shifts in SHIFTS:
        for name, problem in _OF[kernel](device, longest, shifts):
            yield f"{name}, shifts {shifts}", problem


def _packs(device: torch.device, longest: int, shifts: tuple[int, ...]) -> Iterator[tuple[str, Problem]]:
    for dtypes in product(DTYPES, DTYPES):
        yield f"{dtypes[0]} to {dtypes[1]}", PackProblem((*COUNTS, longest), device, dtypes, shifts)
    if len(set(shifts)) > 1:  # more tensors than one launch of numba has room for
        yield "37 tensors", PackProblem([1 + index % 4 for index in range(37)], device, shifts=shifts)


def _sums(device: torch.device, longest: int, shifts: tuple[int, ...]) -> Iterator[tuple[str, Problem]]:
    for dtype, (count, ranks) in product(DTYPES, ((1, 1), (longest, 2), (33, 3), (8, 6))):
        yield f"{ranks} x {count} of {dtype}", SumProblem(count, ranks, device, dtype, shifts)


def _gathers(device: torch.device, longest: int, shifts: tuple[int, ...]) -> Iterator[tuple[str, Problem]]:
    for dtype, (row_count, batch) in product(DTYPES, ((1, 1), (7, 9), (16, 4), (33, 2), (longest // 16 * 16, 2))):
        yield f"{batch} x {row_count} to {dtype}", GatherProblem(5, row_count, batch, device, dtype, shifts)


_OF: dict[str, Callable[[torch.device, int, tuple[int, ...]], Iterator[tuple[str, Problem]]]] = {
    "pack": _packs,
    "sum_ranks": _sums,
    "gather_rows": _gathers,
}


def wrong(prepare: Prepare, kernel: str, rung: str, device: torch.device, longest: int) -> list[str]:
    """What a rung gets wrong, a line per problem; each runs twice, on other inputs."""
    found = []
    for name, problem in problems(kernel, device, longest):
        launch = prepare(problem, rung)
        for salt in (1, 2):
            problem.reset(salt)
            assert problem.wrong() > 0, "a poisoned output passes for a right one"
            launch()
            if count := problem.wrong():
                found.append(f"{kernel}, {rung}, {name}: {count} wrong")
    return found


def check_all(
    prepare: Prepare, kernels: Sequence[str], device: torch.device, longest: int
) -> Iterator[tuple[str, str, list[str]]]:
    """Kernel, rung and what is wrong of it, for all rungs of these kernels."""
    for kernel, rung in product(kernels, RUNGS):
        yield kernel, rung, wrong(prepare, kernel, rung, device, longest)
