"""Advice for the terminal: a table, then sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median, quantiles

from mgpu_core.support.tables import Lines, Table, human_nbytes, human_seconds
from mgpu_core.tools.advise.data import AdviceData, Measurement
from mgpu_core.tools.advise.host_share import HostShare
from mgpu_core.tools.advise.memory import Memory
from mgpu_core.tools.advise.strategies import ONE

__all__ = ["lines_of", "notes_of", "spread"]

_WIDE = 0.1
"""Of the spread that is worth a word."""


def lines_of(advice: AdviceData) -> Lines:
    """Return a title, the table, and sentences."""
    return ["\n".join([*_head(advice), ""]), Table(_rows(advice)), "\n".join(_foot(advice))]


def _head(advice: AdviceData) -> list[str]:
    environment = ", ".join(f"{name} {value}" for name, value in advice.environment.items())
    return [_title(advice), *filter(None, [environment])]


def _foot(advice: AdviceData) -> list[str]:
    star = "* the sample's own batch, which the recommendation is for"
    failed = [f"failed: {each.way} with {each.batch} rows: {each.error}" for each in advice.measurements if each.error]
    return [star, *failed, "", *_told(advice)]


def _title(advice: AdviceData) -> str:
    ranks = f"{len(advice.devices)} {'rank' if len(advice.devices) == 1 else 'ranks'}"
    repeats = max((len(each.seconds) for each in advice.measurements), default=0)
    team = ", ".join(advice.devices)
    return f"one device against {ranks} ({team}): time of a training step, median of {repeats}, and speed-up"


def _rows(advice: AdviceData) -> list[list[str]]:
    head = ["batch"]
    for way in advice.ways:
        head += [way] if way == ONE else [way, ""]
    return [head, *(list(_cells(advice, batch)) for batch in advice.batches)]


def _cells(advice: AdviceData, batch: int) -> Iterator[str]:
    yield f"{batch} *" if batch == advice.rows else str(batch)
    for way in advice.ways:
        seconds = advice.medians.get((way, batch))
        yield "failed" if seconds is None else human_seconds(seconds)
        if way != ONE:
            faster = advice.speedup(way, batch)
            yield "" if faster is None else f"x {faster:.2f}"


def _told(advice: AdviceData) -> list[str]:
    lines = [f"break-even: {advice.break_even}"]
    if advice.memory is not None:
        lines += _memory(advice.memory)
    if advice.shares is not None:
        shares = advice.shares
        lines += [
            f"a recorded step of TrainStep: compute {shares.compute_share:.0%}, exposed communication "
            f"{shares.exposed_share:.0%}, update {shares.update_share:.0%}, host {shares.overhead_share:.0%}",
            f"imbalance: the slowest rank computes {shares.imbalance:.0%} longer than the mean",
        ]
    if advice.host is not None:
        lines.append(_host(advice.host))
    if advice.loader_s is not None:
        lines.append(f"input pipeline: {human_seconds(advice.loader_s)} for {advice.rows} rows")
    lines.append(f"reason: {advice.reason.name}: {advice.reason.text}")
    lines += [f"note: {each}" for each in notes_of(advice)]
    return [*lines, "", f"recommendation: {advice.recommendation.text}"]


def notes_of(advice: AdviceData) -> list[str]:
    """Return the notes of the measurement, and one on samples that are far apart."""
    return [*advice.notes, *_noise(advice.measurements)]


def _host(host: HostShare) -> str:
    gpus = f"{host.gpus} GPUs" if host.gpus > 1 else "one GPU" if host.gpus else "not even one GPU"
    return (
        f"host: {human_seconds(host.forward_s)} a rank for forward and loss, {human_seconds(host.backward_s)} for "
        f"backward; GPU: {human_seconds(host.device_s)} for {host.rows} rows: one process keeps {gpus} busy"
    )


def _memory(memory: Memory) -> list[str]:
    parts = {
        "parameters": memory.parameters_nbytes,
        "gradients": memory.gradients_nbytes,
        "optimizer": memory.optimizer_nbytes,
        "activations": memory.activations_nbytes,
    }
    told = ", ".join(f"{name} {human_nbytes(nbytes)}" for name, nbytes in parts.items())
    lines = [f"memory per rank: {human_nbytes(memory.total_nbytes)} counted: {told}"]
    if memory.peaks:
        peaks = ", ".join(f"{device} {human_nbytes(nbytes)}" for device, nbytes in memory.peaks)
        lines.append(f"memory per device: {peaks} measured: the peak of a step of TrainStep")
    return lines


def spread(measurements: Sequence[Measurement]) -> float:
    """Width of the middle half of a measurement's samples over their median: of the middle one of all measurements."""
    widths = []
    for measurement in measurements:
        if len(measurement.seconds) >= 3:
            low, middle, high = quantiles(measurement.seconds, n=4, method="inclusive")
            widths.append((high - low) / middle if middle else 0.0)
    return median(widths) if widths else 0.0


def _noise(measurements: Sequence[Measurement]) -> list[str]:
    wide = spread(measurements)
    return [f"half of the samples are spread over {wide:.0%} of their median: smaller differences mean nothing"] * (
        wide > _WIDE
    )
