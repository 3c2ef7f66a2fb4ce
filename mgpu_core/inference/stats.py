"""What each device of a predictor has done, as numbers, as a table, and as Prometheus text."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import quantiles

from mgpu_core.support.tables import Table, html_of

__all__ = ["DeviceStats", "Stats"]

_KEPT = 4096  # of the latest batches
_QUANTILES = (50, 90, 99)
_HEADER: tuple[object, ...] = (
    *("rank", "device", "requests", "rows", "share", "batches", "mean rows", "retries"),
    *("queue ms p50/p90/p99", "compute ms"),
)


@dataclass
class DeviceStats:
    """The work of one rank.

    Attributes:
        device: as text.
        requests, rows, batches: that were answered.
        retries: requests that were run again, alone, after their batch.
        failures: requests that got an exception.
        is_lost: the device has failed and is not used any more.
        queue_seconds: of the latest batches, how long the oldest request of each had waited.
        compute_seconds: of the latest batches, from the first copy to the last answer.
    """

    device: str
    requests: int = 0
    rows: int = 0
    batches: int = 0
    retries: int = 0
    failures: int = 0
    is_lost: bool = False
    queue_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    compute_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def mean_batch(self) -> float:
        """Rows of a batch."""
        return self.rows / self.batches if self.batches else 0.0


class Stats(list[DeviceStats]):
    """One :class:`DeviceStats` per rank; ``print`` shows a table."""

    @property
    def shares(self) -> list[float]:
        """The part of all rows that each rank computed."""
        total = sum(each.rows for each in self)
        return [each.rows / total if total else 0.0 for each in self]

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return html_of([self._table()])

    def _table(self) -> Table:
        rows = [_HEADER]
        for rank, (stats, share) in enumerate(zip(self, self.shares, strict=True)):
            name = f"{stats.device} (lost)" if stats.is_lost else stats.device
            counts = stats.requests, stats.rows, f"{share:.1%}", stats.batches, f"{stats.mean_batch:.1f}", stats.retries
            rows += ((rank, name, *counts, _text(stats.queue_seconds), _text(stats.compute_seconds)),)
        return Table(rows, words=(1,))

    def prometheus(self) -> str:
        """Return the counters and quantiles in Prometheus' text format."""
        lines = []
        for name in ("requests", "rows", "batches", "retries", "failures"):
            lines.append(f"# TYPE mgpu_{name}_total counter")
            lines += [
                f'mgpu_{name}_total{{rank="{rank}",device="{stats.device}"}} {getattr(stats, name)}'
                for rank, stats in enumerate(self)
            ]
        for name in ("queue_seconds", "compute_seconds"):
            lines.append(f"# TYPE mgpu_{name} summary")
            for rank, stats in enumerate(self):
                lines += [
                    f'mgpu_{name}{{rank="{rank}",device="{stats.device}",quantile="{percent / 100:g}"}} {value:.6g}'
                    for percent, value in zip(_QUANTILES, _points(getattr(stats, name)), strict=True)
                ]
        return "\n".join(lines) + "\n"


def _points(seconds: deque[float]) -> list[float]:
    values = _copy_of(seconds)
    if len(values) < 2:
        return [values[0] if values else 0.0] * len(_QUANTILES)
    percentiles = quantiles(values, n=100, method="inclusive")
    return [percentiles[percent - 1] for percent in _QUANTILES]


def _copy_of(seconds: deque[float]) -> list[float]:
    while True:
        with suppress(RuntimeError):  # a worker has appended meanwhile
            return list(seconds)


def _text(seconds: deque[float]) -> str:
    return "/".join(f"{1e3 * value:.2f}" for value in _points(seconds))
