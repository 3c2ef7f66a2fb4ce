"""The constants of the cost model for this machine: a short measurement, and least squares on the relative error.

An all-reduce of CPU ranks costs call + ranks x rank + the traffic of its loops x the betas of their tiers, which is
linear in the unknowns.  Every size is measured once a round, each round in another order, and the median of the rounds
is taken: other load of the machine disturbs all sizes alike.  A call is timed right after the same calls, so that data
that fit a cache are in it.  No constant becomes zero or negative, and memory never faster than the cache before it.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mgpu_core import _core, comm
from mgpu_core.devices import cache
from mgpu_core.devices.machine_key import machine_key
from mgpu_core.support.files import write_whole
from mgpu_core.tools.explain.environ import cpu_model
from mgpu_core.tools.explain.host_passes import ALGORITHMS_ON_HOST, host_passes
from mgpu_core.tools.explain.topology import HostMemory, Link, Tier, Topology

__all__ = ["POINTS", "Point", "Sample", "fit_host", "fit_node", "load", "measure", "save", "this_host"]

FORMAT = "mgpu_core host 1"
ROUNDS = 15
BUDGET_SECONDS = 8.0
_WARM_SECONDS = 1e-3  # the same call before the one that counts: once at least, and for so long
_SIZES = (4 << 10, 48 << 10, 192 << 10, 768 << 10, 3 << 20, 12 << 20, 48 << 20)
# Lower bounds of the constants: 10 ns a call, and the time per byte at 100 TB/s.
_LEAST_SECONDS, _LEAST_BETA = 1e-8, 1e-14


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement: an all-reduce of ``nbytes`` bytes of float32 a rank, a multiple of 4."""

    algorithm: str
    ranks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A point and the seconds of each round."""

    point: Point
    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.rounds)


POINTS = tuple(
    Point(algorithm, ranks, nbytes) for algorithm in ALGORITHMS_ON_HOST for ranks in (2, 4, 8) for nbytes in _SIZES
)
"""What :func:`this_host` measures."""


def measure(
    points: Sequence[Point],
    rounds: int = ROUNDS,
    budget_seconds: float = BUDGET_SECONDS,
    devices: Sequence[torch.device | str] | None = None,
) -> list[Sample]:
    """Measure every point once a round, for ``rounds`` rounds or until the time is over.

    Args:
        points: measured one after another, in memory that is as large as the largest point.
        rounds: at most; at least three are run.
        budget_seconds: no further round begins when the next would end later.
        devices: of the ranks, one each; ``None``: the CPU.
    """
    ranks = max(point.ranks for point in points)
    targets = [torch.device(each) for each in devices or ["cpu"] * ranks]
    memory = [torch.zeros(max(point.nbytes for point in points) // 4, device=each) for each in targets[:ranks]]
    seconds: dict[Point, list[float]] = {point: [] for point in points}
    order = random.Random(0)
    begin = time.perf_counter()
    for done in range(rounds):
        spent = time.perf_counter() - begin
        if done >= 3 and spent * (done + 1) / done > budget_seconds:
            break
        for point in order.sample(points, len(points)):
            seconds[point].append(_time(point, memory))
    return [Sample(point, tuple(taken)) for point, taken in seconds.items()]


def _time(point: Point, memory: Sequence[torch.Tensor]) -> float:
    """Zeros, whose sums are zeros however often they are added up."""
    tensors = [each[: point.nbytes // 4] for each in memory[: point.ranks]]

    def run() -> None:
        comm.all_reduce(tensors, algorithm=point.algorithm, merge_shared_devices=False)
        for device in {each.device for each in tensors if each.device.type != "cpu"}:
            torch.accelerator.synchronize(device)

    end = time.perf_counter() + _WARM_SECONDS
    run()
    while time.perf_counter() < end:
        run()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def fit_host(samples: Sequence[Sample], caches: tuple[int, int] | None = None) -> HostMemory:
    """Return the constants that explain measurements of CPU ranks best.

    Args:
        samples: at least seven; the better spread over sizes and ranks, the better the answer.
        caches: bytes in the cache of one core and in that of all; ``None``: read from this machine.

    Raises:
        ValueError: too few samples, or a time that is not positive.
    """
    _check(samples, least=7)
    core_nbytes, all_nbytes = caches or _caches()
    rows = [_host_row(sample.point, core_nbytes, all_nbytes) for sample in samples]
    least = [_LEAST_SECONDS, _LEAST_SECONDS, _LEAST_BETA, 0.0, _LEAST_BETA, 0.0]
    call, rank, one, one_more, both, both_more = _least_squares(rows, [each.seconds for each in samples], least)
    one_core = (Tier(core_nbytes, one), Tier(None, one + one_more))
    all_cores = (Tier(all_nbytes, both), Tier(None, both + both_more))
    # What was not measured is taken from what was, not from the smallest number there is.
    if not any(row[4] for row in rows):
        all_cores = one_core
    if not any(row[2] for row in rows):
        one_core = all_cores
    return HostMemory(call, rank, one_core, all_cores)


def _host_row(point: Point, core_nbytes: int, all_nbytes: int) -> list[float]:
    """Return the factor of each unknown: call, rank; beta in the cache and memory's addition, for one core, for all."""
    row = [1.0, float(point.ranks), 0.0, 0.0, 0.0, 0.0]
    working_set = point.ranks * point.nbytes
    for each in host_passes(point.algorithm, point.ranks, point.nbytes):
        column, held = (2, core_nbytes) if each.is_serial() else (4, all_nbytes)
        row[column] += each.traffic_nbytes
        row[column + 1] += each.traffic_nbytes * (1 - min(1.0, held / working_set))
    return row


def fit_node(samples: Sequence[Sample], name: str = "this node") -> Topology:
    """Latency and bandwidth between this machine's GPUs, from measurements of ``ring`` on two or more of them.

    Raises:
        ValueError: too few samples, another algorithm, or a time that is not positive.
    """
    _check(samples, least=3)
    if any(sample.point.algorithm != "ring" for sample in samples):
        raise ValueError("links are fitted to measurements of ring, whose every step is a message over each link")
    steps = [2 * (sample.point.ranks - 1) for sample in samples]
    shares = [sample.point.nbytes / sample.point.ranks for sample in samples]
    rows = [[1.0, count, count * share] for count, share in zip(steps, shares, strict=True)]
    least = [_LEAST_SECONDS, _LEAST_SECONDS, _LEAST_BETA]
    call, alpha, beta = _least_squares(rows, [each.seconds for each in samples], least)
    return Topology(name, Link(alpha, (Tier(None, beta),)), max(each.point.ranks for each in samples), call_s=call)


def _check(samples: Sequence[Sample], least: int) -> None:
    if len(samples) < least:
        raise ValueError(f"wanted at least {least} measurements, got {len(samples)}")
    if any(sample.seconds <= 0 for sample in samples):
        raise ValueError("a measured time must be above 0 seconds")


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float], least: Sequence[float]) -> list[float]:
    """Return the x >= least with the least sum of ((row . x - seconds) / seconds)^2, exactly.

    It tries every choice of unknowns that are above their least.
    """
    scale = torch.tensor(seconds, dtype=torch.float64)[:, None]
    matrix = torch.tensor(rows, dtype=torch.float64) / scale
    floor = torch.tensor(least, dtype=torch.float64)
    wanted = 1 - matrix @ floor
    units = matrix.abs().amax(0).clamp_min(1e-300)  # columns of one size, so that none is lost in the solver
    best, best_error = torch.zeros_like(floor), float(wanted.square().sum())
    for count in range(1, len(least) + 1):
        for chosen in map(list, itertools.combinations(range(len(least)), count)):
            part = matrix[:, chosen] / units[chosen]
            found = torch.linalg.lstsq(part, wanted[:, None], driver="gelsd").solution[:, 0]
            error = float((part @ found - wanted).square().sum())
            if bool((found >= 0).all()) and error < best_error * (1 - 1e-9):
                best, best_error = torch.zeros_like(floor), error
                best[chosen] = found / units[chosen]
    return [float(each) for each in floor + best]


def _caches() -> tuple[int, int]:
    """Return the bytes of a core's own cache and of the shared one, from Linux; 1 and 32 MiB if unknown."""
    paths = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    known = [int(text[:-1]) << 10 for text in (path.read_text().strip() for path in paths) if text.endswith("K")]
    return (known[2], known[3]) if len(known) >= 4 else (1 << 20, 32 << 20)


def this_host() -> HostMemory:
    """Return this machine's constants, measured earlier or now; a measurement takes some seconds and is kept."""
    key = _fingerprint()
    kept = cache.load("host_memory", key)
    try:
        return _host_of(kept)
    except (TypeError, KeyError, ValueError, OverflowError):
        host = fit_host(measure(POINTS))
        cache.store("host_memory", key, asdict(host))
        return host


def save(path: Path, host: HostMemory) -> None:
    """Write the constants and this machine's fingerprint as JSON, whole or not at all."""
    content = {"format": FORMAT, "machine": _fingerprint(), "host": asdict(host)}
    write_whole(path, lambda stream: stream.write((json.dumps(content, indent=2) + "\n").encode()))


def load(path: Path) -> HostMemory:
    """Return the constants that :func:`save` wrote on this machine.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, of another format, or of another machine.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"wanted the format {FORMAT!r}")
        host = _host_of(content["host"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the constants of a host ({error})") from error
    if content.get("machine") != _fingerprint():
        raise ValueError(f"{path}: measured on another machine or build: measure again")
    return host


def _host_of(content: Any) -> HostMemory:
    tiers = {name: tuple(Tier(**each) for each in content[name]) for name in ("one_core", "all_cores")}
    return HostMemory(**{**content, **tiers})


def _fingerprint() -> dict[str, Any]:
    """Return the key of the constants: this processor, number of threads, this build."""
    return {"cpu": cpu_model(), "threads": _core.num_threads(), "caches": list(_caches()), **machine_key([])}
