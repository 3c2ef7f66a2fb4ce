"""How the ranks of a team run: each in a thread of its own, or one after the other in the caller's thread.

Accelerators compute at the same time, each launched by a thread.  On the CPU a rank in a thread has a part of the
cores, and so other sums: there ``auto`` is ``caller``, and one seed has one result.  Ranks that share an accelerator
gain nothing by threads, which wait for the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["IN_TURNS", "MEETING", "WORKERS", "Workers", "check_workers", "workers_for"]

WORKERS = ("threads", "caller", "auto")


class Workers(NamedTuple):
    """How ranks run.

    Attributes:
        way: ``threads`` or ``caller``.
        why: the reason, for :meth:`mgpu_core.TrainStep.plan`.
    """

    way: str
    why: str


MEETING = Workers("threads", "ranks wait for each other in synchronised layers")
IN_TURNS = Workers("caller", "ranks on one device add to tensors that they share")


def check_workers(workers: str) -> None:
    """Raise ValueError for anything but ``threads``, ``caller`` and ``auto``."""
    if workers not in WORKERS:
        raise ValueError(f"workers must be one of {', '.join(WORKERS)}, not {workers!r}")


def workers_for(asked: str, devices: Sequence[torch.device]) -> Workers:
    """Return how ranks run on these devices, one per rank.

    Args:
        asked: ``threads``, ``caller`` or ``auto``.
        devices: one per rank.
    """
    if asked != "auto":
        return Workers(asked, f'workers="{asked}"')
    if any(device.type == "cpu" for device in devices):
        return Workers("caller", "on the CPU, threads would draw their random numbers in another order each time")
    if len(set(devices)) < len(devices):
        return Workers("caller", "ranks share an accelerator")
    return Workers("threads", "each rank has an accelerator of its own")
