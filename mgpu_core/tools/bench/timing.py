"""How contestants are timed: verified first, then in turns, and told by medians.

A machine that is shared, warm or throttled changes its speed from minute to minute. So the contestants of one row run
A B C A B C ... in one process, each once a round; what the machine does to one, it does to all, and only the ratio of
two medians of one run is ever quoted. Times are in seconds.
"""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = "ours"
"""The name of the contestant that the others are compared with."""

PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
"""The units of the tables."""


QUIET_SECONDS = 0.02
"""Before each run: longer than torch's threads (libgomp's) spin after a parallel operation: some milliseconds."""


OnRound = Callable[[int, int], object]
"""Called between two rounds, with the number of those that are done and of all."""


class WrongResult(Exception):
    """A contestant computes something else than it should: its time means nothing."""


def nothing(*_: object) -> None:
    """For contestants that need no preparation, rows that need no flush, and rounds that nobody counts."""


@dataclass(frozen=True)
class Contestant:
    """One side of a comparison.

    Attributes:
        run: does the work once and returns its seconds.
        wrong: does the work once and returns how many values of the result are wrong.
        prepare: before each run, outside the clock: fresh inputs.
    """

    run: Callable[[], float]
    wrong: Callable[[], int]
    prepare: Callable[[], object] = nothing


@dataclass(frozen=True)
class Timing:
    """How often a row is run, and the work before each run, outside the clock and after `prepare`."""

    repeats: int
    warmup: int = 1
    flush: Callable[[], object] = nothing


def timed(
    work: Callable[[], object], synchronize: Callable[[], object] = nothing, wake: Callable[[], object] = nothing
) -> Callable[[], float]:
    """Return a `run` from a function. The result's own end is inside the clock.

    Args:
        work: to be measured.
        synchronize: waits for the device.
        wake: before the clock: the same work on next to nothing, after a flush that took the program out of the
            cache as well as the inputs. Small sizes would else tell how long Python takes to read itself.
    """

    def run() -> float:
        wake()
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        return time.perf_counter() - begin

    return run


def contest(
    contestants: Mapping[str, Contestant], schedule: Timing, on_round: OnRound = nothing
) -> dict[str, list[float]]:
    """Return the seconds of each contestant, in the order of the rounds.

    Raises:
        WrongResult: a contestant was wrong before the first round or after the last.
    """
    verify(contestants)
    seconds = alternate(contestants, schedule, on_round)
    verify(contestants)
    return seconds


def verify(contestants: Mapping[str, Contestant]) -> None:
    """Raise `WrongResult` for the first contestant with wrong values."""
    for name, contestant in contestants.items():
        if count := contestant.wrong():
            raise WrongResult(f"{name}: {count} wrong {'value' if count == 1 else 'values'}")


def failing(contestants: Mapping[str, Contestant], optional: Collection[str]) -> dict[str, str]:
    """Return which of these fail here, and why: a library may not fit the GPU, or its other libraries."""
    failed = {}
    for name in contestants.keys() & optional:
        try:
            contestants[name].wrong()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def alternate(
    contestants: Mapping[str, Contestant], schedule: Timing, on_round: OnRound = nothing
) -> dict[str, list[float]]:
    """Let each contestant run in turn, A B C A B C ...; the first `warmup` rounds are not kept."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-schedule.warmup, schedule.repeats):
        on_round(number + schedule.warmup, schedule.warmup + schedule.repeats)
        for name, contestant in contestants.items():
            contestant.prepare()
            settle()
            schedule.flush()
            taken = contestant.run()
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def settle() -> None:
    """Wait until the threads of the contestant before are asleep: whoever comes next would share its cores with them.

    Without sleeping: a core that has idled comes back slower, and not equally for all.
    """
    end = time.perf_counter() + QUIET_SECONDS
    while time.perf_counter() < end:
        pass


median = statistics.median


def p90(seconds: Sequence[float]) -> float:
    """Return the time that nine runs of ten keep; between two samples, on the line between them."""
    ordered = sorted(seconds)
    index = 0.9 * (len(ordered) - 1)
    below = ordered[math.floor(index)]
    return below + (ordered[math.ceil(index)] - below) * (index % 1)


def ratio(seconds: Mapping[str, Sequence[float]], peer: str) -> float:
    """Peer's median over ours: 6 means that we are six times faster."""
    return median(seconds[peer]) / median(seconds[OURS])


def significant(value: float) -> str:
    """Four digits that count, without an exponent."""
    digits = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(digits, 0), 6)}f}"


class CacheFlush:
    """Puts other bytes into the last-level cache, so that every run finds its inputs in memory, as after a backward.

    It reads, because large writes (memset) go past the cache; and with one thread, not torch's, because after a
    parallel operation those spin for a while, in the way of whoever comes next.
    """

    def __init__(self) -> None:
        self._bytes = bytearray(b"\1") * (4 * _cache_nbytes())

    def __call__(self) -> None:
        """Look for a byte that is not there, through four times the cache."""
        self._bytes.find(0)


def _cache_nbytes() -> int:
    """Return the size of the last-level cache from Linux (`32768K`), at most 256 MiB; 64 MiB where it is unknown."""
    paths = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    text = paths[-1].read_text().strip() if paths else ""
    known = text.endswith("K") and text[:-1].isdecimal()
    return min(int(text[:-1]) << 10, 256 << 20) if known else 64 << 20
