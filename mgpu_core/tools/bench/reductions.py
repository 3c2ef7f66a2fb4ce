"""The reductions in plain torch and in gloo, for the peers of the cases that reduce."""

import torch
from torch.distributed import ReduceOp

from mgpu_core.tools.bench.collective import Task

GLOO_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "prod": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
}


def gloo_cannot(task: Task) -> str:
    """Return what gloo lacks for a task; empty: it can do it."""
    if task.devices:
        return "it is measured on the CPU only"
    is_whole = not getattr(torch, task.dtype).is_floating_point
    return f"it has no average of {task.dtype}" if task.op == "avg" and is_whole else ""


def fold_into(total: torch.Tensor, other: torch.Tensor, op: str) -> None:
    """Add (multiply, ...) `other` into `total`; a mean is a sum until `finish`."""
    other = other.to(total.device)
    if op in ("sum", "avg"):
        total.add_(other)
    elif op == "prod":
        total.mul_(other)
    else:
        (torch.minimum if op == "min" else torch.maximum)(total, other, out=total)


def finish(total: torch.Tensor, task: Task) -> None:
    """Make a mean of a sum, integers truncated."""
    if task.op == "avg":
        total.div_(task.ranks, rounding_mode=None if total.is_floating_point() else "trunc")
