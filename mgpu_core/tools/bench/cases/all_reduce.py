"""All-reduce in place: every rank ends with the reduction over all, in its own tensor."""

from collections.abc import Sequence

import torch
from torch import distributed

from mgpu_core import comm
from mgpu_core.tools.bench.case import Label, at_least
from mgpu_core.tools.bench.collective import Collective, Task, Tensors, around
from mgpu_core.tools.bench.collective_case import case_of
from mgpu_core.tools.bench.reductions import GLOO_OPS, finish, fold_into


def ours(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """One call for the team."""
    comm.all_reduce(sends, task.op, algorithm=task.algorithm)
    return sends


def loop(task: Task, sends: Sequence[torch.Tensor]) -> Tensors:
    """Into rank 0's tensor one after the other, then back to all."""
    for send in sends[1:]:
        fold_into(sends[0], send, task.op)
    finish(sends[0], task)
    for send in sends[1:]:
        send.copy_(sends[0])
    return sends


def gloo(task: Task, _rank: int, send: torch.Tensor) -> torch.Tensor:
    """One call in each process."""
    distributed.all_reduce(send, GLOO_OPS[task.op])
    return send


COLLECTIVE = Collective(
    name="all_reduce",
    summary="mgpu_core.comm.all_reduce in place, one tensor per rank",
    position="in",
    split=False,
    bus_factor=around,
    sends=lambda values, rank: values.of(rank),
    wanted=lambda values, _rank: values.folded(),
    ours=ours,
    loop=loop,
    gloo=gloo,
    ops=("sum", "avg", "prod", "min", "max"),
    algorithms=("auto", "naive", "direct", "ring", "tree", "nccl"),
)

_AT: dict[str, Label] = {"size": 64 << 20, "device": "cpu", "type": "float32", "redop": "sum", "algorithm": "auto"}
CASE = case_of(
    COLLECTIVE,
    bounds=tuple(
        at_least(limit, peer, ranks=ranks, **_AT)
        for peer, limits in (("gloo", (6, 9, 13)), ("torch", (1.3, 2, 2.8)))
        for ranks, limit in zip((2, 4, 8), limits, strict=True)
    ),
    repeats=40,  # gloo's time moves by 5 percent from round to round
)
