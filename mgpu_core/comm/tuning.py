"""Which algorithm `auto` is on GPUs: measured at first use, for at most a second, and kept for this machine.

The table has one algorithm per size; a call takes that of the next larger size.  It is not measured at import nor while
a graph is captured; for sizes that the second did not reach, a fixed table stands in.  The kept table is that
of these GPUs, this driver, this NCCL and this build (:mod:`mgpu_core.devices.cache`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgpu_core import _core
from mgpu_core.comm.traffic_trace import discard_warmup
from mgpu_core.devices import cache
from mgpu_core.devices.exclusive import Exclusive
from mgpu_core.devices.machine_key import machine_key
from mgpu_core.devices.nccl_teams import P2P_VARIABLE, nccl_is_there, nccl_is_trusted, practice
from mgpu_core.trace.tracer import mark

__all__ = ["choose", "fixed_choice", "kept_table", "measure"]

SIZES = (4 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024, 16 * 1024 * 1024)  # bytes of each rank
MOST_OF_PUSH = _core.push_nbytes()  # beyond it there are several launches
BUDGET_SECONDS = 1.0
PRACTICE_SECONDS = 30.0  # then NCCL is given up: to make communicators, and for a collective that never ends
_REPEATS = 3

Table = Mapping[int, str]
Run = Callable[[str, int], None]  # all-reduces so many bytes by this algorithm, waits for it and checks the result

_tables: dict[tuple[int, ...], Table] = {}
# Two threads that measure together would see each other's load, and share a team.
_one_at_a_time = Exclusive("the measurement of all-reduces in another thread did not end")


def choose(devices: Sequence[int], nbytes: int, run: Run) -> str:
    """Return the algorithm for an all-reduce of ``nbytes`` a rank over these GPUs, one entry per rank."""
    unique_devices = tuple(devices)
    if len(set(unique_devices)) == 1:
        return "direct"  # one device: nothing is sent
    if unique_devices not in _tables:
        with _one_at_a_time.enter():
            if unique_devices not in _tables:
                _tables[unique_devices] = _table_of(unique_devices, run)
    return lookup(_tables[unique_devices], nbytes)


def lookup(table: Table, nbytes: int) -> str:
    """Return the entry of the next larger size; beyond the largest, the largest's."""
    fitting = [size for size in table if size >= nbytes]
    return table[min(fitting) if fitting else max(table)]


def fixed_choice(nbytes: int, *, nccl: bool) -> str:
    """Return the choice that is right on most machines: few hops for small sizes, NCCL's bandwidth for large ones."""
    if nbytes <= 1024 * 1024:
        return "direct"
    return "nccl" if nccl else "direct"


def kept_table(devices: Sequence[int]) -> dict[int, str] | None:
    """Return the table measured for these GPUs, by this process or an earlier one."""
    kept = cache.load("tuning", _key(devices))
    try:
        return None if kept is None else {int(size): str(algorithm) for size, algorithm in kept.items()}
    except (AttributeError, ValueError):
        return None


def _key(devices: Sequence[int]) -> dict[str, Any]:
    p2p = os.environ.get(P2P_VARIABLE, "")
    return {**machine_key(devices), "nccl": _core.nccl_version(), "trusted": nccl_is_trusted(), P2P_VARIABLE: p2p}


def _table_of(devices: Sequence[int], run: Run) -> Table:
    nccl = nccl_is_there() and nccl_is_trusted()
    kept = kept_table(devices)
    if kept:
        return kept
    with practice(devices, PRACTICE_SECONDS):
        algorithms = _that_run(["direct", "push", "ring", "naive", *(["nccl"] if nccl else [])], run)
        measured = measure(run, algorithms, SIZES, BUDGET_SECONDS, time.perf_counter)
    table = {size: measured.get(size, fixed_choice(size, nccl="nccl" in algorithms)) for size in SIZES}
    if len(measured) == len(SIZES):  # what was guessed is not kept
        cache.store("tuning", _key(devices), {str(size): algorithm for size, algorithm in table.items()})
    mark("tuning", text=str(table))
    discard_warmup()
    return table


def _that_run(algorithms: Sequence[str], run: Run) -> list[str]:
    """Return the algorithms that work here, by running each once: making communicators and memory takes seconds."""
    working = []
    for algorithm in algorithms:
        try:
            run(algorithm, MOST_OF_PUSH if algorithm == "push" else SIZES[-1])
        except Exception:  # also torch's, where there is no memory for the practice
            continue
        working.append(algorithm)
    return working


def measure(
    run: Run, algorithms: list[str], sizes: Sequence[int], budget_seconds: float, clock: Callable[[], float]
) -> dict[int, str]:
    """Return the fastest algorithm for each size, as far as the budget reaches; the first run of each is not counted.

    Removes an algorithm that fails from ``algorithms``.
    """
    end = clock() + budget_seconds
    fastest: dict[int, str] = {}
    for size in sizes:
        seconds: dict[str, float] = {}
        for algorithm in list(algorithms):
            if clock() > end:
                return fastest
            if algorithm == "push" and size > MOST_OF_PUSH:
                continue
            try:
                seconds[algorithm] = _time(run, algorithm, size, clock)
            except Exception:
                algorithms.remove(algorithm)
        if seconds:
            fastest[size] = min(seconds, key=seconds.__getitem__)
    return fastest


def _time(run: Run, algorithm: str, size: int, clock: Callable[[], float]) -> float:
    run(algorithm, size)
    best = float("inf")
    for _ in range(_REPEATS):
        begin = clock()
        run(algorithm, size)
        best = min(best, clock() - begin)
    return best
