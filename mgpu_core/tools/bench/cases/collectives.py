"""The collectives, a row each: three ways to do it (ours, the torch loop, gloo) and the closed form of its result.

``ours`` and ``loop`` have the tensors of all ranks; ``gloo`` runs in each rank's process and has its own.
"""

from collections.abc import Callable, Sequence

import torch
from torch import distributed
from torch.distributed import ReduceOp

from mgpu_core import comm
from mgpu_core.tools.bench.case import Label, at_least
from mgpu_core.tools.bench.collective import TeamCase, TeamTask, Tensors, around, whole
from mgpu_core.tools.bench.collective_case import case_of

OPS = {"sum": ReduceOp.SUM, "avg": ReduceOp.AVG, "prod": ReduceOp.PRODUCT, "min": ReduceOp.MIN, "max": ReduceOp.MAX}


def fold_into(total: torch.Tensor, other: torch.Tensor, op: str) -> None:
    """Add (multiply, ...) `other` into `total`; a mean is a sum until `finish`."""
    other = other.to(total.device)
    if op in ("sum", "avg"):
        total.add_(other)
    elif op == "prod":
        total.mul_(other)
    else:
        (torch.minimum if op == "min" else torch.maximum)(total, other, out=total)


def finish(total: torch.Tensor, task: TeamTask) -> None:
    """Make a mean of a sum, integers truncated."""
    if task.op == "avg":
        total.div_(task.ranks, rounding_mode=None if total.is_floating_point() else "trunc")


def _devices(task: TeamTask) -> list[str]:
    return [task.device(rank) for rank in range(task.ranks)]


def _at_root(result: torch.Tensor, task: TeamTask) -> Tensors:
    return [result, *[None] * (task.ranks - 1)]


def _into(result: torch.Tensor, call: Callable[[torch.Tensor], object]) -> torch.Tensor:
    call(result)
    return result


def _joined(sends: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat([send.to(device) for send in sends])


def _all_reduced(task: TeamTask, sends: Sequence[torch.Tensor]) -> Tensors:
    comm.all_reduce(sends, task.op, algorithm=task.algorithm)
    return sends


def _all_reduced_in_turn(task: TeamTask, sends: Sequence[torch.Tensor]) -> Tensors:
    """Into rank 0's tensor one after the other, then back to all."""
    for send in sends[1:]:
        fold_into(sends[0], send, task.op)
    finish(sends[0], task)
    for send in sends[1:]:
        send.copy_(sends[0])
    return sends


def _reduced_in_turn(task: TeamTask, parts: Sequence[torch.Tensor], device: str | torch.device) -> torch.Tensor:
    """Into a copy of the first one, one after the other."""
    total = parts[0].to(device, copy=True)
    for part in parts[1:]:
        fold_into(total, part, task.op)
    finish(total, task)
    return total


def _reduced_by_gloo(_task: TeamTask, rank: int, send: torch.Tensor) -> torch.Tensor | None:
    """Gloo reduces into rank 0's own tensor, which is less work than a fresh one."""
    distributed.reduce(send, dst=0)
    return send if rank == 0 else None


def _gathered_by_gloo(task: TeamTask, rank: int, send: torch.Tensor) -> torch.Tensor | None:
    result = send.new_empty(task.ranks * task.count) if rank == 0 else None
    distributed.gather(send, None if result is None else list(result.chunk(task.ranks)), dst=0)
    return result


_AT: dict[str, Label] = {"size": 64 << 20, "device": "cpu", "type": "float32", "redop": "sum", "algorithm": "auto"}
_BOUNDS = tuple(
    at_least(limit, peer, ranks=ranks, **_AT)
    for peer, limits in (("gloo", (6, 9, 13)), ("torch", (1.3, 2, 2.8)))
    for ranks, limit in zip((2, 4, 8), limits, strict=True)
)
# fmt: off
_ROWS = (
    TeamCase(
        name="all_reduce", summary="mgpu_core.comm.all_reduce in place, one tensor per rank",
        position="in", split=False, bus_factor=around, ops=(*OPS,),
        algorithms=("auto", "naive", "direct", "push", "ring", "tree", "nccl"),
        wanted=lambda values, _rank: values.folded(),
        ours=_all_reduced, loop=_all_reduced_in_turn,
        gloo=lambda task, _rank, send: _into(send, lambda out: distributed.all_reduce(out, OPS[task.op])),
        bounds=_BOUNDS, repeats=40,  # gloo's time moves by 5 percent from round to round
    ),
    TeamCase(
        name="broadcast", summary="mgpu_core.comm.broadcast of rank 0's tensor", split=False, bus_factor=whole,
        sends=lambda values, rank: values.of(0, chunks=1 if rank == 0 else 0),
        wanted=lambda values, _rank: values.of(0),
        ours=lambda task, sends: comm.broadcast(sends[0], _devices(task)),
        loop=lambda task, sends: [sends[0], *(sends[0].to(device, copy=True) for device in _devices(task)[1:])],
        gloo=lambda task, rank, send: _into(
            send if rank == 0 else send.new_empty(task.count), lambda out: distributed.broadcast(out, src=0)),
    ),
    TeamCase(
        name="reduce", summary="mgpu_core.comm.reduce_add to rank 0", split=False, bus_factor=whole,
        wanted=lambda values, rank: values.folded() if rank == 0 else None,
        ours=lambda task, sends: _at_root(comm.reduce_add(sends), task),
        loop=lambda task, sends: _at_root(_reduced_in_turn(task, sends, sends[0].device), task),
        gloo=_reduced_by_gloo,
    ),
    TeamCase(
        name="all_gather", summary="mgpu_core.comm.all_gather, one tensor per rank",
        wanted=lambda values, _rank: values.joined(),
        ours=lambda _task, sends: comm.all_gather(sends),
        loop=lambda _task, sends: [_joined(sends, own.device) for own in sends],
        gloo=lambda task, _rank, send: _into(
            send.new_empty(task.ranks * task.count), lambda out: distributed.all_gather_into_tensor(out, send)),
    ),
    TeamCase(
        name="reduce_scatter", summary="mgpu_core.comm.reduce_scatter, one chunk per rank", ops=(*OPS,),
        sends=lambda values, rank: values.of(rank, chunks=values.task.ranks),
        wanted=lambda values, rank: values.folded(rank),
        ours=lambda task, sends: comm.reduce_scatter(sends, task.op),
        loop=lambda task, sends: [
            _reduced_in_turn(task, chunks, task.device(rank))
            for rank, chunks in enumerate(zip(*(send.chunk(task.ranks) for send in sends), strict=True))],
        gloo=lambda task, _rank, send: _into(
            send.new_empty(task.count), lambda out: distributed.reduce_scatter_tensor(out, send, OPS[task.op])),
    ),
    TeamCase(
        name="scatter", summary="mgpu_core.comm.scatter of rank 0's tensor",
        sends=lambda values, rank: values.of(0, chunks=values.task.ranks if rank == 0 else 0),
        wanted=lambda values, rank: values.of(0, chunk=rank),
        ours=lambda task, sends: comm.scatter(sends[0], _devices(task)),
        loop=lambda task, sends: [
            chunk.to(task.device(rank), copy=True) for rank, chunk in enumerate(sends[0].chunk(task.ranks))],
        gloo=lambda task, rank, send: _into(
            send.new_empty(task.count),
            lambda out: distributed.scatter(out, list(send.chunk(task.ranks)) if rank == 0 else None, src=0)),
    ),
    TeamCase(
        name="gather", summary="mgpu_core.comm.gather to rank 0",
        wanted=lambda values, rank: values.joined() if rank == 0 else None,
        ours=lambda task, sends: _at_root(comm.gather(sends), task),
        loop=lambda task, sends: _at_root(_joined(sends, sends[0].device), task),
        gloo=_gathered_by_gloo,
    ),
)
# fmt: on
COLLECTIVES = {each.name: each for each in _ROWS}
CASES = {each.name: case_of(each) for each in _ROWS}
