"""Times the rungs of one kernel in turns, beside the shipped kernel and a plain copy of as many bytes.

As in all benchmarks here (`mgpu_core/tools/bench/timing.py`): verified first, then A B C A B C ..., the L2 flushed
before each run, the device's own clock between two events, and verified again. All rungs work on the same tensors.
"""

import itertools
from collections.abc import Mapping
from functools import cache

import torch

from benchmarks.ladder.languages import Prepare
from benchmarks.ladder.problems import GatherProblem, PackProblem, Problem, Step, SumProblem
from benchmarks.ladder.rungs import RUNGS
from mgpu_core.tools.bench.case import Contest, Label, Row, UsageError
from mgpu_core.tools.bench.device_clock import DeviceClock
from mgpu_core.tools.bench.kernel_case import even_counts
from mgpu_core.tools.bench.measure import row_of
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, failing

COPY = "copy"
RANKS, TENSORS, PIXELS, IMAGES = 4, 64, 28 * 28, 60000
WARMUP = 2


def problem_of(kernel: str, nbytes: int, device: torch.device) -> Problem:
    """The tensors to measure: `nbytes` of float32 in the flat buffer, in each rank's tensor, or in the batch.

    Raises:
        UsageError: too few for one element of each tensor.
    """
    if kernel == "pack":
        return PackProblem(even_counts(nbytes, TENSORS), device)
    if kernel == "sum_ranks":
        return SumProblem(even_counts(nbytes, 1)[0], RANKS, device)
    batch = nbytes // (4 * PIXELS)
    if batch == 0:
        raise UsageError(f"--size: {nbytes} bytes are less than one row of {PIXELS} float32")
    return GatherProblem(max(batch, IMAGES), PIXELS, batch, device)


def peak_of(device: torch.device) -> int:
    """The memory's bandwidth in GB/s by its clock and the width of its bus, both edges of the clock; 0 if unknown."""
    properties = torch.cuda.get_device_properties(device)
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return round(2 * kilohertz * 1e3 * bits / 8 / 1e9)


def contestant_of(rung: str, language: str) -> str:
    """How a rung is called in a row's times."""
    return f"{rung} {language}"


def measure(kernel: str, nbytes: int, languages: Mapping[str, Prepare], device: torch.device, repeats: int) -> Row:
    """The times of one kernel's ladder.

    Raises:
        WrongResult: who is wrong.
        UsageError: a size too small.
    """
    problem = problem_of(kernel, nbytes, device)
    clock = DeviceClock(device)
    salts = itertools.count(1)

    def contestant(step: Step) -> Contestant:
        def wrong() -> int:
            problem.reset(next(salts))
            step()
            return problem.wrong()

        return Contestant(clock.run_of(step, "device"), wrong)

    contestants = {OURS: contestant(problem.shipped())}
    rungs: list[str] = []
    for rung, (language, prepare) in itertools.product(RUNGS, languages.items()):
        rungs.append(contestant_of(rung, language))
        contestants[rungs[-1]] = contestant(_later(prepare, problem, rung))
    without = failing(contestants, rungs)
    contestants = {who: side for who, side in contestants.items() if who not in without}
    contestants[COPY] = _copy(problem, clock)
    labels: dict[str, Label] = {"kernel": kernel, "size": nbytes, "peak": peak_of(device)}
    labels["moved"] = f"{problem.moved(RUNGS[0]) / problem.nbytes:.2f}"
    schedule = Timing(repeats, WARMUP, clock.flush)
    return row_of(Contest(labels, contestants, schedule, problem.nbytes, without=without))


def _later(prepare: Prepare, problem: Problem, rung: str) -> Step:
    """The rung, compiled when it is first launched."""
    launch = cache(lambda: prepare(problem, rung))
    return lambda: launch()()


def _copy(problem: Problem, clock: DeviceClock) -> Contestant:
    """The floor: half of the needed bytes read, as many written, by torch."""
    source = torch.full((problem.nbytes // 2,), 7, dtype=torch.uint8, device=problem.device)
    target = torch.zeros_like(source)

    def wrong() -> int:
        target.zero_()
        target.copy_(source)
        return int((target != source).sum())

    return Contestant(clock.run_of(lambda: target.copy_(source), "device"), wrong)
