"""The numbers of an advice: measurements and conclusions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from mgpu_core.tools.advise.break_even import BreakEven
from mgpu_core.tools.advise.host_share import HostShare
from mgpu_core.tools.advise.memory import Memory
from mgpu_core.tools.advise.reasons import Reason
from mgpu_core.tools.advise.recommend import Recommendation
from mgpu_core.tools.advise.shares import StepShares
from mgpu_core.tools.advise.strategies import NAMES, ONE

__all__ = ["AdviceData", "Measurement", "best_speedups", "speedup"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way with one batch.

    Attributes:
        way: its name.
        batch: rows.
        seconds: of a step, one entry per repeat; empty where it failed.
        error: why it failed, in a line; empty where it did not.
    """

    way: str
    batch: int
    seconds: tuple[float, ...]
    error: str = ""

    @property
    def median_s(self) -> float | None:
        """Seconds of a step; ``None`` where it failed."""
        return median(self.seconds) if self.seconds else None


Medians = Mapping[tuple[str, int], float]


def speedup(medians: Medians, way: str, batch: int) -> float | None:
    """Over one device; ``None`` where one of the two is not there."""
    one, other = medians.get((ONE, batch)), medians.get((way, batch))
    return None if one is None or other is None else one / other


def best_speedups(medians: Medians) -> dict[int, float]:
    """Return the speed-up of the best other strategy, at each batch that can be compared."""
    best: dict[int, float] = {}
    for way, batch in medians:
        value = None if way == ONE else speedup(medians, way, batch)
        if value is not None:
            best[batch] = max(value, best.get(batch, 0.0))
    return best


@dataclass(frozen=True)
class AdviceData:
    """One device against many ranks, on one model.

    Attributes:
        devices: one per rank, as text.
        rows: of the sample: the batch that the recommendation is for.
        measurements: of each way at each batch.
        break_even: the batch from which on many ranks are faster.
        memory: of one rank; ``None`` if it could not be counted.
        shares: of a recorded step of ``TrainStep``; ``None`` if there is none.
        host: a rank's step on the host and on its GPU; ``None`` off NVIDIA GPUs.
        loader_s: seconds in which the loader has as many rows as the sample; ``None`` without a loader.
        reason: the main cost of many ranks.
        recommendation: the strategy to take.
        notes: measurements left out, and failures besides those of strategies.
        environment: the machine and versions.
    """

    devices: tuple[str, ...]
    rows: int
    measurements: tuple[Measurement, ...]
    break_even: BreakEven
    memory: Memory | None
    shares: StepShares | None
    host: HostShare | None
    loader_s: float | None
    reason: Reason
    recommendation: Recommendation
    notes: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def ways(self) -> list[str]:
        """That were tried, simplest first."""
        tried = {each.way for each in self.measurements}
        return [name for name in NAMES if name in tried]

    @property
    def batches(self) -> list[int]:
        """Rows of those that were measured, in order."""
        return sorted({each.batch for each in self.measurements})

    @property
    def medians(self) -> dict[tuple[str, int], float]:
        """Seconds of a step by way and batch, where it did not fail."""
        every = {(each.way, each.batch): each.median_s for each in self.measurements}
        return {key: seconds for key, seconds in every.items() if seconds is not None}

    def speedup(self, way: str, batch: int) -> float | None:
        """Over one device with the same batch; ``None`` where one of the two failed or was not measured."""
        return speedup(self.medians, way, batch)
