"""A few steps of ``TrainStep``, alone and recorded: where its time goes, and its peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from mgpu_core.devices.plug_ins import total_nbytes
from mgpu_core.tools.advise.batches import Batch
from mgpu_core.tools.advise.plan import AdvicePlan
from mgpu_core.tools.advise.shares import StepShares, shares_of, times_of
from mgpu_core.tools.advise.strategies import StepEngine
from mgpu_core.tools.explain.recorder import explain

__all__ = ["Peaks", "Traced", "record_steps"]

_RECORDED = 5


@dataclass(frozen=True, slots=True)
class Traced:
    """The numbers of the recorded step of median time.

    Attributes:
        peaks: see :class:`mgpu_core.tools.advise.memory.Memory`.
    """

    shares: StepShares
    peaks: tuple[tuple[str, int], ...]


def record_steps(plan: AdvicePlan, batch: Batch) -> Traced:
    """Warm up, measure the peak of one step, then record some."""
    peaks = Peaks([each for each in plan.distinct_devices if total_nbytes(each) is not None])
    with closing(StepEngine(plan)) as way:
        for _ in range(way.warm_up):
            way.step(batch)
        peaks.begin()
        way.step(batch)
        peak_nbytes = peaks.found()
        with explain() as trace:
            for _ in range(_RECORDED):
                way.step(batch)
    ordered = sorted(trace.steps, key=lambda step: step.end_ns - step.begin_ns)
    step = ordered[len(ordered) // 2]
    return Traced(shares_of(times_of(step)), peak_nbytes)


class Peaks:
    """The peak of torch's memory on each accelerator, above its level when this was made.

    Args:
        devices: accelerators, each once.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._held = [torch.accelerator.memory_allocated(device) for device in devices]

    def begin(self) -> None:
        """Start now; wait for work that is still running."""
        for device in self._devices:
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)

    def found(self) -> tuple[tuple[str, int], ...]:
        """Return the peaks so far: ``(device, nbytes)``."""
        for device in self._devices:
            torch.accelerator.synchronize(device)
        most = [torch.accelerator.max_memory_allocated(device) for device in self._devices]
        return tuple((str(each), high - low) for each, high, low in zip(self._devices, most, self._held, strict=True))
