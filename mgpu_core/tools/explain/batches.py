"""The batches of predictors: who ran what when, how long requests waited, and idle shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mgpu_core.tools.explain.enclosing import Enclosing
from mgpu_core.tools.explain.phases import covered
from mgpu_core.tools.explain.steps import Step

__all__ = ["BatchRun", "Server", "batches_of", "inference_data", "served_times", "servers_of"]

MOST_DRAWN = 60
"""The batches on the page, the last ones: more of them could not be told apart."""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch of a :class:`mgpu_core.Predictor`.  Times are in ns of ``time.perf_counter_ns``.

    Attributes:
        predictor: 0 for the first predictor of the recording that ran a batch, 1 for the second, ...
        devices: of all ranks of the predictor, as text.
        requests: how many were joined.
        waited_ns: how long the oldest request had been in the queue.
        launched_ns: when the batch left the queue.
        begin_ns, end_ns: of the work; on a GPU measured by CUDA events.
    """

    predictor: int
    rank: int
    devices: tuple[str, ...]
    rows: int
    requests: int
    waited_ns: int
    launched_ns: int
    begin_ns: int
    end_ns: int

    @property
    def asked_ns(self) -> int:
        """When the oldest request was made."""
        return self.launched_ns - self.waited_ns


@dataclass(frozen=True)
class Server:
    """One rank of one predictor.

    Attributes:
        name: as the table and the page show it.
        batches: in order; none where others took all requests.
        idle: the share of the time, 0 to 1, in which the rank ran no batch; the time is that from the first begin to
            the last end among all ranks of the predictor.
    """

    name: str
    batches: list[BatchRun]
    idle: float


def batches_of(step: Step) -> list[BatchRun]:
    """Return the batches of a step, by the time at which they left the queue."""
    enclosing, numbers, runs = Enclosing(step.spans), dict[int, int](), []
    for run in step.served:
        span = enclosing.span(run.thread, "batch", run.host_begin_ns)
        if span is not None:
            number = numbers.setdefault(run.predictor, len(numbers))
            times = span.host_begin_ns, span.begin_ns, span.end_ns
            runs.append(BatchRun(number, run.rank, run.devices, run.rows, run.requests, run.waited_ns, *times))
    return sorted(runs, key=lambda batch: batch.launched_ns)


def servers_of(batches: list[BatchRun]) -> list[Server]:
    """Return all ranks of the predictors that ran batches, by predictor and rank."""
    servers, count = [], 1 + max((batch.predictor for batch in batches), default=-1)
    for predictor in range(count):
        team = [batch for batch in batches if batch.predictor == predictor]
        length = max(each.end_ns for each in team) - min(each.begin_ns for each in team)
        for rank, device in enumerate(team[0].devices):
            rank_batches = [batch for batch in team if batch.rank == rank]
            idle = 1 - covered((each.begin_ns, each.end_ns) for each in rank_batches) / length if length else 0.0
            name = f"rank {rank} ({device})"
            servers.append(Server(f"predictor {predictor}, {name}" if count > 1 else name, rank_batches, idle))
    return servers


def served_times(batches: list[BatchRun]) -> tuple[int, int]:
    """Return when the first request was made, and when the last batch ended, ns."""
    return min(min(each.begin_ns, each.asked_ns) for each in batches), max(each.end_ns for each in batches)


def inference_data(step: Step) -> dict[str, Any] | None:
    """Return the page's data: the ranks' names and the last batches, in us since the first request; or ``None``."""
    batches = batches_of(step)
    if not batches:
        return None
    servers, drawn = servers_of(batches), batches[-MOST_DRAWN:]
    row_of = {id(batch): row for row, server in enumerate(servers) for batch in server.batches}
    begin_ns = served_times(batches)[0]

    def us(at_ns: int) -> float:
        return round((at_ns - begin_ns) / 1e3, 3)

    return {
        "ranks": [each.name for each in servers],
        "batches": [
            {
                "row": row_of[id(batch)], "rows": batch.rows, "requests": batch.requests,
                "asked": us(batch.asked_ns), "launched": us(batch.launched_ns),
                "begin": us(batch.begin_ns), "end": us(batch.end_ns),
            }
            for batch in drawn
        ],
        "left_out": len(batches) - len(drawn),
    }  # fmt: skip
