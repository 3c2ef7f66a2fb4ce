"""All-gather: every rank ends with the tensors of all, joined."""

from collections.abc import Sequence

import torch
from torch import distributed

from mgpu_core import comm
from mgpu_core.tools.bench.collective import Collective, Task, Tensors, others
from mgpu_core.tools.bench.collective_case import case_of


def ours(_task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """One call for the team."""
    return comm.all_gather(sends)


def loop(_task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """Return a `cat` for each rank."""
    return [torch.cat([send.to(own.device) for send in sends]) for own in sends]


def gloo(task: Task, _rank: int, send: torch.Tensor) -> torch.Tensor:
    """One call in each process."""
    result = send.new_empty(task.ranks * task.count)
    distributed.all_gather_into_tensor(result, send)
    return result


COLLECTIVE = Collective(
    name="all_gather",
    summary="mgpu_core.comm.all_gather, one tensor per rank",
    position="out",
    split=True,
    bus_factor=others,
    sends=lambda values, rank: values.of(rank),
    wanted=lambda values, _rank: values.joined(),
    ours=ours,
    loop=loop,
    gloo=gloo,
)
CASE = case_of(COLLECTIVE)
