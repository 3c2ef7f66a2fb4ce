"""Shared by the kernels' cases: options, rows, the floor, and contestants.

A case brings a `Problem`: the tensors of one row and the ways to do its work on them, the same tensors for everybody.
Here are added the clock of the device, and `copy`: a copy of as many bytes as the kernel reads and writes. No kernel
can be faster than its traffic, so `copy/ours` says how much of the memory's bandwidth it reached: 0.95 is 95 %.
"""

import argparse
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch

from mgpu_core.tools.bench.case import Bound, Case, Contest, Label, RowPlan, UsageError, at_least, chosen
from mgpu_core.tools.bench.device_clock import DeviceClock
from mgpu_core.tools.bench.options import parse_count, parse_sizes
from mgpu_core.tools.bench.timing import Contestant, Timing, failing

COPY = "copy"
TWINS: dict[str, str] = {}
"""By the name of a library, the module that has our kernels written again for it; see :func:`add_twin`."""
POISON = float("nan")
"""What stands in an output that nobody has written: it differs from every number."""
FULL = 256 << 20
"""Bytes of the rows that have bounds."""
FLOOR = 0.90
"""Of the copy's bandwidth."""
FEW = 1000
"""Tensors."""

Side = Callable[[], object]


@dataclass(frozen=True)
class Task:
    """The settings of a row.

    Attributes:
        device: where all of it happens.
        counts: elements of each tensor, float32.
        clock: `device` (the work alone) or `wall` (from the call to the end).
    """

    device: torch.device
    counts: Sequence[int]
    clock: str

    @property
    def count(self) -> int:
        """Elements of all tensors together."""
        return sum(self.counts)

    @property
    def labels(self) -> dict[str, Label]:
        """The first columns of the row."""
        of_tensors: dict[str, Label] = {"size": 4 * self.count, "tensors": len(self.counts)}
        return {"device": self.device.type} | of_tensors | {"clock": self.clock}


class Problem(Protocol):
    """One row's tensors, and the ways to do its work.

    Attributes:
        nbytes: read and written, together.
        sides: per contestant its work, done once; all on the same tensors.
        turns: how often that is done between `reset` and `wrong`.
    """

    nbytes: int
    sides: Mapping[str, Side]
    turns: int

    def reset(self, salt: int) -> None:
        """Fill the inputs with values that depend on the salt, and poison the outputs."""

    def wrong(self) -> int:
        """How many values of the outputs are wrong."""


def whole_numbers(count: int, salt: int, device: torch.device) -> torch.Tensor:
    """0 to 12, another order for every salt; sums of them are exact."""
    return ((torch.arange(count, device=device, dtype=torch.int32) * 7 + salt) % 13).float()


def differing(values: torch.Tensor, wanted: torch.Tensor, tolerance: float = 0.0) -> int:
    """How many elements are not as wanted; NaN never is."""
    return int((~torch.isclose(values, wanted, rtol=tolerance, atol=tolerance)).sum())


def add_twin(library: str, module: str) -> None:
    """Let our kernels, written again for a library, take part where the library and a GPU are."""
    TWINS[library] = module


@cache
def twins(device: torch.device) -> dict[str, object]:
    """Return the modules of our twins that can run there."""
    there = [name for name in TWINS if device.type == "cuda" and importlib.util.find_spec(name)]
    modules: dict[str, object] = {}
    for name in there:
        try:
            modules[name] = importlib.import_module(TWINS[name])
        except Exception as error:  # it does not fit the other libraries here, and each has an error of its own
            print(f"without {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return modules


def twin_sides(task: Task, call: Callable[[Any], object]) -> dict[str, Side]:
    """Return the sides of our twins, given a call of one."""
    return {who: partial(call, twin) for who, twin in twins(task.device).items()}


def case_of(
    problem: Callable[[Task], Problem],
    name: str,
    text: str,
    peers: tuple[str, ...],
    traffic: str,
    *,
    function: str = "",
    twinned: bool = False,
    pieces: bool = True,
    many: bool = False,
    bounds: tuple[Bound, ...] = (),
) -> Case:
    """Return a kernel's case.

    Args:
        name: of the case, and of the function unless that is given.
        text: the work of the function, for the summary.
        traffic: the bytes read and written, in words for the formula.
        twinned: the twins have it, too.
        pieces: the work is on a list of tensors, so their number is an option.
        many: also a row of many small tensors.
        bounds: besides that of all kernels, which should do nothing but wait for memory.
    """
    return Case(
        name=name,
        summary=f"mgpu_core.kernels.{function or name}: {text}",
        peers=(*peers, COPY),
        more_peers=tuple(TWINS) if twinned else (),
        plan=partial(_plan, problem, (*peers, COPY), twinned),
        add_arguments=partial(_add_arguments, pieces, many),
        unit="us",
        formula=f"GB/s = ({traffic}) / median time, 1 GB = 10^9 bytes; copy: as many bytes, by torch",
        bounds=(at_least(FLOOR, COPY, device="cuda", size=FULL, clock="device"), *bounds),
        repeats=20,
    )


def _add_arguments(pieces: bool, many: bool, parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    add("--sizes", type=parse_sizes, metavar="LIST", help="of the flat buffer (default: 256M, on a CPU 64M)")
    if pieces:
        add("--tensors", type=parse_count, metavar="N", help="that it consists of (default: %(default)s)")
    if many:
        add("--many", type=parse_count, metavar="N", help="small tensors of another row (default: %(default)s)")
    parser.set_defaults(tensors=64 if pieces else 1, many=10000 if many else 0)


def _plan(
    problem: Callable[[Task], Problem], peers: Sequence[str], twinned: bool, options: argparse.Namespace
) -> RowPlan:
    """Return a row per size, and those of many small tensors; without `--peers` with all that can take part there."""
    device = _device(options.device)
    there = [*peers, *(twins(device) if twinned else ())]
    for peer in options.named:
        if peer not in there:
            raise UsageError(f"--peers: {peer} needs a GPU and the package {peer}")
    tasks = [(task, options.named or _peers_of(task, there)) for task in tasks_of(device, options)]
    return RowPlan([task.labels for task, _ in tasks], _contests(problem, device, tasks, options.repeats))


def _peers_of(task: Task, there: Sequence[str]) -> list[str]:
    """Numba packs 16 tensors a launch: of thousands it would show nothing but the time of its launches."""
    return [peer for peer in there if peer != "numba" or len(task.counts) <= FEW]


def _contests(
    problem: Callable[[Task], Problem],
    device: torch.device,
    tasks: Sequence[tuple[Task, Sequence[str]]],
    repeats: int,
) -> Generator[Contest]:
    clock = DeviceClock(device)
    schedule = Timing(repeats, warmup=2, flush=clock.flush)
    for task, peers in tasks:
        yield _contest(problem(task), task, peers, clock, schedule)


def _contest(problem: Problem, task: Task, peers: Sequence[str], clock: DeviceClock, schedule: Timing) -> Contest:
    salts = itertools.count(1)

    def contestant(side: Side) -> Contestant:
        def wrong() -> int:
            problem.reset(next(salts))
            for _ in range(problem.turns):
                side()
            return problem.wrong()

        return Contestant(clock.run_of(side, task.clock), wrong)

    contestants = {who: contestant(side) for who, side in problem.sides.items()}
    copy = _MemoryCopy(problem.nbytes // 2, task.device)
    contestants[COPY] = Contestant(clock.run_of(copy.work, task.clock), copy.wrong)
    without = failing(chosen(contestants, peers), TWINS.keys())
    working = chosen(contestants, [peer for peer in peers if peer not in without])
    return Contest(task.labels, working, schedule, problem.nbytes, without=without)


class _MemoryCopy:
    """The floor: so many bytes read, as many written."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._source = torch.full((nbytes,), 7, dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self._source)

    def work(self) -> None:
        self._target.copy_(self._source)

    def wrong(self) -> int:
        self._target.zero_()
        self.work()
        return int((self._target != self._source).sum())


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU")
    kind = name or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def tasks_of(device: torch.device, options: argparse.Namespace) -> list[Task]:
    """Yield the rows; nothing is allocated for them yet."""
    sizes = options.sizes or [FULL if device.type == "cuda" else FULL // 4]
    alone = "device" if device.type == "cuda" else "wall"
    tasks = [Task(device, even_counts(size, options.tensors), alone) for size in sizes]
    if options.many:
        small = small_counts(options.many)
        tasks += [Task(device, small, clock) for clock in dict.fromkeys((alone, "wall"))]
    return tasks


def even_counts(nbytes: int, tensors: int) -> list[int]:
    """float32 tensors of about one size, each of whole 16 bytes but the last."""
    count = nbytes // 4
    of_one = count // tensors // 4 * 4
    if of_one == 0:
        raise UsageError(f"--sizes: {nbytes} bytes are less than 16 for each of {tensors} tensors")
    return [of_one] * (tensors - 1) + [count - of_one * (tensors - 1)]


def small_counts(tensors: int) -> list[int]:
    """float32 tensors of 1 to 64 KiB, all sizes mixed."""
    return [256 * (1 + index * 37 % 64) for index in range(tensors)]
