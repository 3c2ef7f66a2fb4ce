"""Broadcast: every rank ends with rank 0's tensor; rank 0 with the tensor itself."""

from collections.abc import Sequence

import torch
from torch import distributed

from mgpu_core import comm
from mgpu_core.tools.bench.collective import Collective, Task, Tensors, whole
from mgpu_core.tools.bench.collective_case import case_of


def ours(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """One call for the team."""
    return comm.broadcast(sends[0], [task.device(rank) for rank in range(task.ranks)])


def loop(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """Return a copy for each other rank."""
    return [sends[0], *(sends[0].to(task.device(rank), copy=True) for rank in range(1, task.ranks))]


def gloo(task: Task, rank: int, send: torch.Tensor) -> torch.Tensor:
    """One call in each process."""
    result = send if rank == 0 else send.new_empty(task.count)
    distributed.broadcast(result, src=0)
    return result


COLLECTIVE = Collective(
    name="broadcast",
    summary="mgpu_core.comm.broadcast of rank 0's tensor",
    position="out",
    split=False,
    bus_factor=whole,
    sends=lambda values, rank: values.of(0, chunks=1 if rank == 0 else 0),
    wanted=lambda values, _rank: values.of(0),
    ours=ours,
    loop=loop,
    gloo=gloo,
)
CASE = case_of(COLLECTIVE)
