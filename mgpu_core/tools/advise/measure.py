"""``advise``: measures, and draws the conclusions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.nn import Module

from mgpu_core.devices.devices import CPU, DeviceLike
from mgpu_core.support.progress import Report, silent, within
from mgpu_core.tools.advise.batches import resized
from mgpu_core.tools.advise.benchmark import Budget, Stopwatch, contest, stopwatch
from mgpu_core.tools.advise.break_even import break_even
from mgpu_core.tools.advise.cut import capacity_of, recommended_cut
from mgpu_core.tools.advise.data import Measurement, best_speedups
from mgpu_core.tools.advise.from_trace import Traced, record_steps
from mgpu_core.tools.advise.host_share import HostShare, measured_share
from mgpu_core.tools.advise.loading import loader_seconds
from mgpu_core.tools.advise.memory import Memory, count_memory
from mgpu_core.tools.advise.plan import REPEATS, SECONDS, AdvicePlan, MakeOptimizer, plan_of
from mgpu_core.tools.advise.reasons import reason_of
from mgpu_core.tools.advise.recommend import Recommendation, recommend
from mgpu_core.tools.advise.result import Advice
from mgpu_core.tools.advise.strategies import first_line, makers
from mgpu_core.tools.advise.surroundings import busy_notes, random_state_kept
from mgpu_core.tools.explain.environ import environment

__all__ = ["advise", "advised"]

T = TypeVar("T")


def advise(
    net: Module,
    loss_fn: Callable[..., Any] | None,
    sample: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    *,
    device_ids: Sequence[DeviceLike] | None = None,
    batches: Sequence[int] | None = None,
    optimizer: MakeOptimizer | None = None,
    loader: Iterable[Any] | None = None,
    repeats: int = REPEATS,
    seconds: float = SECONDS,
    device_nbytes: int | None = None,
) -> Advice:
    """Measure one device against many ranks on this model, and recommend one, with the reason.

    The plain loop on the first device, ``DataParallel``, ``TrainStep`` and, where all ranks are on CUDA GPUs, a
    captured ``TrainStep`` take turns.  All of it happens on deep copies: ``net``, its gradients and the random numbers
    that come next are as before.  A way that fails is reported as failed.

    Args:
        net: as it is, training or not; anywhere.
        loss_fn: ``loss_fn(output, target)``, a mean over its rows; ``None``: the module returns the loss.
        sample: one batch, ``(inputs..., target)``: tensors with rows along dimension 0; no target without ``loss_fn``.
            A dict of tensors by the names of the forward's arguments, where the module returns the loss.
        device_ids: one device per rank; ``None``: all accelerators, else as many CPU ranks as ``MGPU_CORE_CPU_RANKS``
            says, else 2.
        batches: rows of the batches to measure, the sample's own always among them; ``None``: a quarter of those, and
            four times as many.  They are made by cutting or repeating the sample.
        optimizer: from a list of parameters to an optimizer, such as ``torch.optim.AdamW``; ``None``: SGD that changes
            nothing (``lr=0.0``).
        loader: of batches; a few are taken, to see whether the input pipeline keeps up.  An iterator loses them.
        repeats: of each measurement; medians count.
        device_nbytes: the memory of one device, such as ``24 * 2**30``; ``None``: as the GPUs say.  A model that needs
            more is not measured: the advice is where to cut it.
        seconds: for all of it.  When they are over, there are fewer repeats (3 at least), then fewer batches.

    Raises:
        TypeError, ValueError: arguments that do not fit together, before anything is measured.
        RuntimeError: a recording is on.
    """
    plan = plan_of(
        net, loss_fn, sample, device_ids=device_ids, batches=batches, optimizer=optimizer, loader=loader,
        repeats=repeats, seconds=seconds, device_nbytes=device_nbytes,
    )  # fmt: skip
    return advised(plan, stopwatch(plan.distinct_devices))


@dataclass(slots=True)
class _Findings:
    """The measurements so far, and notes on those left out."""

    notes: list[str] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    def tried(self, what: str, measure: Callable[[], T]) -> T | None:
        """Return the result, or a note on why there is none."""
        try:
            return measure()
        except Exception as error:
            self.notes.append(f"{what}: {first_line(error)}")
            return None


def advised(plan: AdvicePlan, clock: Stopwatch, report: Report = silent) -> Advice:
    """Measure by ``clock`` and recordings, and draw the conclusions."""
    with random_state_kept(plan.devices), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each way would say the same; a failure is told in the result
        return _advised(plan, clock, report)


def _advised(plan: AdvicePlan, clock: Stopwatch, report: Report) -> Advice:
    budget, findings = Budget(plan.seconds), _Findings(busy_notes(plan.distinct_devices))
    loader_s = None
    if plan.loader is not None:
        loader = plan.loader
        report(0.0, "the loader")
        loader_s = findings.tried(
            "the loader was not measured", lambda: loader_seconds(loader, plan.rows, budget.part(5))
        )
    report(0.0, "memory, and a recorded step")
    part = math.ceil(plan.rows / len(plan.devices))
    memory = findings.tried("memory was not counted", lambda: count_memory(plan, resized(plan.sample, part)))
    capacity = capacity_of(plan)
    if capacity is not None and memory is None:  # there may have been too little
        on_host = replace(plan, devices=(CPU,))
        memory = findings.tried("nor on the CPU", lambda: count_memory(on_host, resized(plan.sample, part)))
    if memory is not None and capacity is not None and memory.total_nbytes > capacity:
        cut = recommended_cut(plan, memory, capacity)
        return _concluded(plan, findings, memory, None, loader_s, recommendation=cut)
    seen = findings.tried("no step was recorded", lambda: record_steps(plan, resized(plan.sample, plan.rows)))
    host = None
    if plan.devices[0].type == "cuda":
        host = findings.tried("the host's share was not measured", lambda: measured_share(plan))
    _contests(plan, budget, clock, findings, report)
    return _concluded(plan, findings, memory, seen, loader_s, host)


def _contests(plan: AdvicePlan, budget: Budget, clock: Stopwatch, findings: _Findings, report: Report) -> None:
    """Time the strategies at each batch, the sample's own batch first."""
    ordered = [plan.rows, *(each for each in plan.batches if each != plan.rows)]
    for index, rows in enumerate(ordered):
        if index and budget.left <= 0:
            left = ", ".join(map(str, ordered[index:]))
            findings.notes.append(f"the {plan.seconds:g} s were over: batches of {left} rows were not measured")
            return
        batch = resized(plan.sample, rows)
        part = within(report, index, len(ordered))
        measurements = contest(makers(plan), batch, plan.repeats, budget.part(len(ordered) - index), clock, part)
        findings.measurements += measurements
        rounds = max(len(each.seconds) for each in measurements)
        if 0 < rounds < plan.repeats:
            findings.notes.append(f"{rounds} repeats instead of {plan.repeats} with {rows} rows: the time was up")


def _concluded(
    plan: AdvicePlan,
    findings: _Findings,
    memory: Memory | None,
    seen: Traced | None,
    loader_s: float | None,
    host: HostShare | None = None,
    recommendation: Recommendation | None = None,
) -> Advice:
    measurements = tuple(sorted(findings.measurements, key=lambda measurement: measurement.batch))
    medians = {(each.way, each.batch): each.median_s for each in measurements if each.median_s is not None}
    seconds_by_way = {way: seconds for (way, batch), seconds in medians.items() if batch == plan.rows}
    of_more_rows = {way: seconds for (way, batch), seconds in medians.items() if batch > plan.rows}
    reason = reason_of(
        None if seen is None else seen.shares,
        ranks=len(plan.devices),
        device_count=len(plan.distinct_devices),
        best_s=min(seconds_by_way.values(), default=None),
        loader_s=loader_s,
    )
    return Advice(
        devices=tuple(map(str, plan.devices)),
        rows=plan.rows,
        measurements=measurements,
        break_even=break_even(best_speedups(medians)),
        memory=memory if memory is None or seen is None else replace(memory, peaks=seen.peaks),
        shares=None if seen is None else seen.shares,
        host=host,
        loader_s=loader_s,
        reason=reason,
        recommendation=recommendation
        or recommend(
            seconds_by_way,
            gpus=sum(each.type == "cuda" for each in plan.distinct_devices),
            host=host,
            loader_s=loader_s,
            reason=reason.name,
            device_count=len(plan.distinct_devices),
            ranks=len(plan.devices),
            of_more_rows=of_more_rows,
        ),
        notes=tuple(findings.notes),
        environment=environment(),
    )
