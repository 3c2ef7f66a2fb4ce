"""Reduce: rank 0 ends with the sum over all ranks."""

from collections.abc import Sequence

import torch
from torch import distributed

from mgpu_core import comm
from mgpu_core.tools.bench.collective import Collective, Task, Tensors, whole
from mgpu_core.tools.bench.collective_case import case_of


def ours(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """One call for the team."""
    return [comm.reduce_add(sends), *[None] * (task.ranks - 1)]


def loop(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """Into a clone of rank 0's tensor, one after the other."""
    total = sends[0].clone()
    for send in sends[1:]:
        total.add_(send.to(total.device))
    return [total, *[None] * (task.ranks - 1)]


def gloo(_task: Task, rank: int, send: torch.Tensor) -> torch.Tensor | None:
    """One call in each process; gloo reduces into rank 0's own tensor, which is less work than a fresh one."""
    distributed.reduce(send, dst=0)
    return send if rank == 0 else None


COLLECTIVE = Collective(
    name="reduce",
    summary="mgpu_core.comm.reduce_add to rank 0",
    position="out",
    split=False,
    bus_factor=whole,
    sends=lambda values, rank: values.of(rank),
    wanted=lambda values, rank: values.folded() if rank == 0 else None,
    ours=ours,
    loop=loop,
    gloo=gloo,
)
CASE = case_of(COLLECTIVE)
