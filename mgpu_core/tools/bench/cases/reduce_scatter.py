"""Reduce-scatter: rank r ends with chunk r of the reduction over all."""

from collections.abc import Sequence

import torch
from torch import distributed

from mgpu_core import comm
from mgpu_core.tools.bench.collective import Collective, Task, Tensors, others
from mgpu_core.tools.bench.collective_case import case_of
from mgpu_core.tools.bench.reductions import GLOO_OPS, finish, fold_into


def ours(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """One call for the team."""
    return comm.reduce_scatter(sends, task.op)


def loop(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """Chunk by chunk, into a clone of rank 0's."""
    results = []
    for rank, (first, *more) in enumerate(zip(*(send.chunk(task.ranks) for send in sends), strict=True)):
        total = first.to(task.device(rank), copy=True)
        for chunk in more:
            fold_into(total, chunk, task.op)
        finish(total, task)
        results.append(total)
    return results


def gloo(task: Task, _rank: int, send: torch.Tensor) -> torch.Tensor:
    """One call in each process."""
    result = send.new_empty(task.count)
    distributed.reduce_scatter_tensor(result, send, GLOO_OPS[task.op])
    return result


COLLECTIVE = Collective(
    name="reduce_scatter",
    summary="mgpu_core.comm.reduce_scatter, one chunk per rank",
    position="out",
    split=True,
    bus_factor=others,
    sends=lambda values, rank: values.of(rank, chunks=values.task.ranks),
    wanted=lambda values, rank: values.folded(rank),
    ours=ours,
    loop=loop,
    gloo=gloo,
    ops=("sum", "avg", "prod", "min", "max"),
)
CASE = case_of(COLLECTIVE)
