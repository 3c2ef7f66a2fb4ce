"""The host's time for a rank's step, and so how many GPUs one process can keep busy.

One thread of Python asks for the forwards of all ranks, one after the other; autograd asks for their backwards by a
thread a GPU, at the same time.  So ``n`` GPUs wait for the host unless ``n * forward + backward`` on the host is less
than the time that a GPU needs::

    host     | forward 0 | forward 1 | forward 2 | backward |
    GPU 0    | ...... a rank's step ......... |  waits  |      n = 3 is one too many here
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median

import torch

from mgpu_core.devices.transfer import to_device
from mgpu_core.tools.advise.batches import Batch, resized
from mgpu_core.tools.advise.device_time import DeviceTime
from mgpu_core.tools.advise.plan import AdvicePlan
from mgpu_core.tools.advise.strategies import Loop

__all__ = ["HostShare", "measured_share"]

_FEW_ROWS = 2
"""On so few rows a GPU has done each launch before the next one comes: it never makes the host wait."""
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class HostShare:
    """A rank's step, on the host and on its GPU; seconds.

    Attributes:
        rows: of the rank.
        forward_s: in which the host asks for forward and loss.
        backward_s: in which it asks for the backward.
        device_s: that the GPU needs for the whole step.
    """

    rows: int
    forward_s: float
    backward_s: float
    device_s: float

    @property
    def gpus(self) -> int:
        """The most GPUs that one process keeps busy with such steps; 0: even one waits for the host."""
        return max(0, math.ceil((self.device_s - self.backward_s) / self.forward_s) - 1)


def measured_share(plan: AdvicePlan) -> HostShare:
    """Return the share of the plain loop on the first device, a GPU, with a rank's part of the sample.

    The host is timed on two rows, so that it never waits for the GPU, and the GPU on all rows of the rank, behind a
    sleep, so that it never waits for the host.
    """
    device = plan.devices[0]
    rows = math.ceil(plan.rows / len(plan.devices))
    with torch.cuda.device(device), closing(Loop(plan, lambda net: net)) as way:
        few, full = (_on(device, resized(plan.sample, count)) for count in (min(rows, _FEW_ROWS), rows))
        for _ in range(way.warm_up):
            way.step(few)
            way.step(full)
        asked = [_asked(way, few, device) for _ in range(_REPEATS)]
        device_time = DeviceTime(lambda: way.step(full))
        needed = [device_time() for _ in range(_REPEATS)]
    forward_s, backward_s = (median(each) for each in zip(*asked, strict=True))
    return HostShare(rows, forward_s, backward_s, median(needed))


def _on(device: torch.device, batch: Batch) -> Batch:
    return tuple(to_device(each, device) for each in batch)


def _asked(way: Loop, batch: Batch, device: torch.device) -> tuple[float, float]:
    """Return the host's seconds for forward and loss, and for backward, of a GPU that has nothing else to do."""
    way.optimizer.zero_grad()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    loss = way.loss(batch)
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    way.optimizer.step()
    return middle - begin, end - middle
