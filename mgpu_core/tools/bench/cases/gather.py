"""Gather: rank 0 ends with the tensors of all ranks, joined."""

from collections.abc import Sequence

import torch
from torch import distributed

from mgpu_core import comm
from mgpu_core.tools.bench.collective import Collective, Task, Tensors, others
from mgpu_core.tools.bench.collective_case import case_of


def ours(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """One call for the team."""
    return [comm.gather(sends), *[None] * (task.ranks - 1)]


def loop(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """One `cat`."""
    return [torch.cat([send.to(sends[0].device) for send in sends]), *[None] * (task.ranks - 1)]


def gloo(task: Task, rank: int, send: torch.Tensor) -> torch.Tensor | None:
    """One call in each process."""
    result = send.new_empty(task.ranks * task.count) if rank == 0 else None
    distributed.gather(send, None if result is None else list(result.chunk(task.ranks)), dst=0)
    return result


COLLECTIVE = Collective(
    name="gather",
    summary="mgpu_core.comm.gather to rank 0",
    position="out",
    split=True,
    bus_factor=others,
    sends=lambda values, rank: values.of(rank),
    wanted=lambda values, rank: values.joined() if rank == 0 else None,
    ours=ours,
    loop=loop,
    gloo=gloo,
)
CASE = case_of(COLLECTIVE)
