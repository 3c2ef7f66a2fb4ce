"""Which rows are whose, what a bucket holds, and when gradients come, for a recording."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import register_multi_grad_hook

from mgpu_core.comm.layout import nbytes_of
from mgpu_core.entries import Contents, Cut
from mgpu_core.record import current_step, in_step, is_on, keep, mark

__all__ = ["tell_backward", "tell_contents", "tell_cut", "tell_ready"]


def tell_cut(
    step: str, name: str, whole: torch.device, parts: Sequence[torch.Tensor], dim: int, route: str = "copy"
) -> None:
    """Of a tensor on ``whole`` and its ranks' parts along ``dim``; nothing when no recording is on."""
    if not is_on():
        return
    counts = tuple(part.size(dim) if part.dim() else 1 for part in parts)
    shapes = tuple(tuple(part.shape) for part in parts)
    dtype = str(parts[0].dtype).removeprefix("torch.")
    nbytes = tuple(map(nbytes_of, parts))
    devices = tuple(str(part.device) for part in parts)
    keep(
        lambda host_ns, thread: Cut(
            step, name, dim, counts, shapes, dtype, nbytes, route, str(whole), devices, host_ns, thread
        )
    )


def tell_contents(step: str, bucket: int, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Of a bucket, the tensors by name; nothing when no recording is on."""
    if not is_on():
        return
    names, nbytes = tuple(name for name, _ in named), tuple(nbytes_of(tensor) for _, tensor in named)
    keep(lambda host_ns, thread: Contents(step, bucket, names, nbytes, host_ns, thread))


def tell_backward(rank: int, outputs: Sequence[torch.Tensor]) -> None:
    """Marks when the first gradient of a rank's outputs is there, and when that backward is over.

    The user's own leaves would keep such a hook for ever.
    """
    own = [output for output in outputs if output.requires_grad and not output.is_leaf]
    if not own:
        return
    number, device, seen = current_step(), own[0].device, set[int]()

    def arrived(_gradient: torch.Tensor) -> None:
        run = torch._C._current_graph_task_id()
        if run in seen:
            return
        seen.add(run)
        with in_step(number):
            mark("backward", rank, device, text=str(run))
        torch.autograd.Variable._execution_engine.queue_callback(lambda: over(run))

    def over(run: int) -> None:
        with in_step(number):
            mark("backward ends", rank, device, text=str(run))

    for output in own:
        output.register_hook(arrived)


def tell_ready(rank: int, bucket: int, copies: Sequence[torch.Tensor]) -> None:
    """Marks when a rank has all its gradients of a bucket, those of its copies of the parameters."""
    own = [copy for copy in copies if copy.requires_grad]
    if not own:
        return
    number, device = current_step(), own[0].device

    def ready(_gradients: object) -> None:
        with in_step(number):
            mark("ready", rank, device, bucket, str(torch._C._current_graph_task_id()))

    register_multi_grad_hook(own, ready)
