"""Scatter: rank r ends with chunk r of rank 0's tensor."""

from collections.abc import Sequence

import torch
from torch import distributed

from mgpu_core import comm
from mgpu_core.tools.bench.collective import Collective, Task, Tensors, others
from mgpu_core.tools.bench.collective_case import case_of


def ours(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """One call for the team."""
    return comm.scatter(sends[0], [task.device(rank) for rank in range(task.ranks)])


def loop(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """Return a copy of each chunk."""
    return [chunk.to(task.device(rank), copy=True) for rank, chunk in enumerate(sends[0].chunk(task.ranks))]


def gloo(task: Task, rank: int, send: torch.Tensor) -> torch.Tensor:
    """One call in each process."""
    result = send.new_empty(task.count)
    distributed.scatter(result, list(send.chunk(task.ranks)) if rank == 0 else None, src=0)
    return result


COLLECTIVE = Collective(
    name="scatter",
    summary="mgpu_core.comm.scatter of rank 0's tensor",
    position="out",
    split=True,
    bus_factor=others,
    sends=lambda values, rank: values.of(0, chunks=values.task.ranks if rank == 0 else 0),
    wanted=lambda values, rank: values.of(0, chunk=rank),
    ours=ours,
    loop=loop,
    gloo=gloo,
)
CASE = case_of(COLLECTIVE)
