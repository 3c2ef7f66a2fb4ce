"""The cost model against the clock: all-reduce of CPU ranks, fitted on some sizes and checked on others.

Everything is measured in one run, every size once a round, those of the fit among those of the check, so that both meet
the same machine.  Unlike in `all_reduce` the cache is not flushed: a call is timed right after the same call, because
the model has the effect of the cache.  `model` is the prediction; `model/ours` is predicted over measured.
"""

import argparse
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

from mgpu_core.tools.bench.case import Bound, Case, Contest, Label, Plan, Row, UsageError, Verdict
from mgpu_core.tools.bench.cases.all_reduce import COLLECTIVE
from mgpu_core.tools.bench.collective import Holding, Task, around
from mgpu_core.tools.bench.options import add_ranks, names_among, parse_sizes
from mgpu_core.tools.bench.timing import OURS, Contestant, Schedule, WrongResult, median
from mgpu_core.tools.explain.cost import all_reduce_seconds
from mgpu_core.tools.explain.fit import Point, Sample, fit_host, measure
from mgpu_core.tools.explain.host_passes import ALGORITHMS_ON_HOST, host_passes
from mgpu_core.tools.explain.topology import HostMemory

MODEL, ONE_BETA = "model", "one_beta"
FITTED = (4 << 10, *((48 << 10) << doubled for doubled in range(11)))
"""Sizes of the fit, in bytes of a rank: 4 KiB, and 48 KiB to 48 MiB, halfway between the powers of two of the check."""
BUDGET_SECONDS = 120.0


@dataclass(frozen=True)
class Within(Bound):
    """Predicted and measured differ by a factor of at most `limit`, whichever is larger.

    `of`: the median of the rows, or each of them.
    """

    of: Literal["median", "each"] = "each"

    def judge(self, rows: Sequence[Row]) -> Verdict:
        """Return the verdict on all rows that the bound is about."""
        ratios = [row.ratios()[self.peer] for row in rows if self.where.items() <= row.labels.items()]
        misses = [max(ratio, 1 / ratio) for ratio in ratios]
        where = ", ".join(f"{name} {value}" for name, value in self.where.items())
        text = f"{where}: predicted within {self.limit:g}x of measured, {self.of} of the sizes"
        if not misses:
            return Verdict(text, None, None)
        value = median(misses) if self.of == "median" else max(misses)
        return Verdict(text, value, value <= self.limit)


def plan(options: argparse.Namespace) -> Plan:
    """Return a row per algorithm, number of ranks and size. `UsageError` for points that cannot be measured."""
    if max(options.ranks) > 8 or min(options.ranks) < 2:
        raise UsageError(f"--ranks: wanted 2 to 8, got {options.ranks}")
    if shared := set(FITTED) & set(options.sizes):
        raise UsageError(f"--sizes: {min(shared)} bytes is a size of the fit, and would check the model with itself")
    if rest := [size for size in options.sizes if size % 4]:
        raise UsageError(f"--sizes: wanted multiples of 4 bytes, got {rest[0]}")
    points = _points(options, options.sizes)
    return Plan(list(map(_labels, points)), _contests(options, points))


def _labels(point: Point) -> dict[str, Label]:
    return {"ranks": point.ranks, "size": point.nbytes, "algorithm": point.algorithm}


def _contests(options: argparse.Namespace, checked: Sequence[Point]) -> Generator[Contest]:
    """Measure all points at once, so that the contest of each only repeats what its clock has said."""
    _verify(checked)
    found = measure([*_points(options, FITTED), *checked], options.repeats, BUDGET_SECONDS)
    samples = {sample.point: sample for sample in found}
    host = fit_host([samples[point] for point in _points(options, FITTED)])
    print(f"fitted: {_described(host)}", file=sys.stderr, flush=True)
    for point in checked:
        seconds = {OURS: list(samples[point].rounds)}
        if MODEL in options.peers:
            seconds[MODEL] = [all_reduce_seconds(point.algorithm, point.ranks, point.nbytes, host)]
        if ONE_BETA in options.peers:
            seconds[ONE_BETA] = [_one_beta(point, samples)]
        sides = {who: Contestant(cycle(times).__next__, lambda: 0) for who, times in seconds.items()}
        schedule = Schedule(len(seconds[OURS]), warmup=0)
        yield Contest(_labels(point), sides, schedule, point.nbytes, around(point.ranks))


def _points(options: argparse.Namespace, sizes: Sequence[int]) -> list[Point]:
    return [
        Point(algorithm, ranks, size) for algorithm in options.algorithms for ranks in options.ranks for size in sizes
    ]


def _verify(points: Sequence[Point]) -> None:
    """Raise `WrongResult` for the first point with a wrong value."""
    for point in points:
        task = Task(point.ranks, point.nbytes // 4, algorithm=point.algorithm)
        holding = Holding(COLLECTIVE, task, range(point.ranks))
        if count := holding.wrong(lambda: COLLECTIVE.ours(task, holding.sends), salt=1):  # noqa: B023
            raise WrongResult(f"{point}: {count} wrong values")


def _one_beta(point: Point, samples: dict[Point, Sample]) -> float:
    """Return the textbook's line: alpha is the time of the smallest size, and one beta that of the largest."""
    ends = [samples[Point(point.algorithm, point.ranks, size)].seconds for size in (FITTED[0], FITTED[-1])]
    traffic = [
        sum(each.traffic_nbytes for each in host_passes(point.algorithm, point.ranks, size))
        for size in (FITTED[-1], point.nbytes)
    ]
    return ends[0] + traffic[1] * max(0.0, ends[1] - ends[0]) / traffic[0]


def _described(host: HostMemory) -> str:
    tiers = {"one core": host.one_core, "all cores": host.all_cores}
    rates = [f"{name} {' then '.join(f'{1e-9 / tier.beta_s_per_byte:.0f}' for tier in tiers[name])}" for name in tiers]
    return f"call {host.call_s * 1e6:.1f} us, {host.rank_s * 1e6:.1f} us a rank; GB/s: {', '.join(rates)}"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, "2,4,8")
    add = parser.add_argument
    add("--sizes", type=parse_sizes, default="64K:64M", metavar="LIST", help="of the check (default: %(default)s)")
    add(
        "--algorithms",
        type=names_among(("auto", *ALGORITHMS_ON_HOST)),
        default="auto",
        metavar="LIST",
        help=f"of auto, {', '.join(ALGORITHMS_ON_HOST)} (default: %(default)s)",
    )


BOUNDS: tuple[tuple[float, Literal["median", "each"]], ...] = ((1.5, "median"), (2, "each"))

CASE = Case(
    name="all_reduce_model",
    summary="the cost model: all-reduce of CPU ranks, fitted on some sizes and checked on others",
    peers=(MODEL,),
    more_peers=(ONE_BETA,),
    plan=plan,
    add_arguments=_add_arguments,
    unit="us",
    formula="model/ours: predicted over measured; algbw = size / time, busbw = algbw x 2(n-1)/n with n ranks",
    bounds=tuple(
        Within("at most", limit, MODEL, {"algorithm": algorithm}, of) for algorithm in ("auto",) for limit, of in BOUNDS
    ),
    repeats=21,
)
