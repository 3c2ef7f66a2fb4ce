"""Events for a trace: the rows of each rank, the contents of a bucket, and when gradients are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import register_multi_grad_hook

from mgpu_core.comm.layout import nbytes_of
from mgpu_core.trace.events import Contents, Cut
from mgpu_core.trace.tracer import current_step, emit, in_step, mark, when_tracing

__all__ = ["trace_backward", "trace_contents", "trace_cut", "trace_ready"]


@when_tracing
def trace_cut(
    step: str, name: str, whole: torch.device, parts: Sequence[torch.Tensor], dim: int, route: str = "copy"
) -> None:
    """Tell a recording of a tensor on ``whole`` and its ranks' parts along ``dim``."""
    counts = tuple(part.size(dim) if part.dim() else 1 for part in parts)
    shapes = tuple(tuple(part.shape) for part in parts)
    dtype = str(parts[0].dtype).removeprefix("torch.")
    nbytes = tuple(map(nbytes_of, parts))
    devices = tuple(str(part.device) for part in parts)
    emit(
        lambda host_ns, thread: Cut(
            step, name, dim, counts, shapes, dtype, nbytes, route, str(whole), devices, host_ns, thread
        )
    )


@when_tracing
def trace_contents(step: str, bucket: int, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Tell a recording which tensors a bucket holds."""
    names, nbytes = tuple(name for name, _ in named), tuple(nbytes_of(tensor) for _, tensor in named)
    emit(lambda host_ns, thread: Contents(step, bucket, names, nbytes, host_ns, thread))


@when_tracing
def trace_backward(rank: int, outputs: Sequence[torch.Tensor]) -> None:
    """Mark when the first gradient of a rank's outputs is there, and when that backward is over."""
    about = _Backward(rank, current_step(), outputs[0].device if outputs else torch.device("cpu"))
    for output in outputs:
        node = output.grad_fn  # not the tensor: it may be the user's own, and would be saved and copied with its hooks
        if node is not None:
            metadata: dict[str, dict[int, _Backward]] = node.metadata  # type: ignore[assignment]  # the stub: a method
            if _TOLD not in metadata:
                of_ranks = metadata[_TOLD] = {}
                node.register_prehook(partial(_arrived, of_ranks))
            metadata[_TOLD][rank] = about  # an output that comes again tells of the last forward


_TOLD = "mgpu_core_backward"


@when_tracing
def _arrived(of_ranks: dict[int, _Backward], _gradients: object) -> None:
    for backward in of_ranks.values():
        backward.arrived()


@dataclass(slots=True)
class _Backward:
    """The backward of one rank's forward, which may run several times."""

    rank: int
    whole_step: int
    device: torch.device
    seen: set[int] = field(default_factory=set)

    def arrived(self) -> None:
        run = torch._C._current_graph_task_id()
        if run not in self.seen:
            self.seen.add(run)
            self._mark("backward", run)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._mark("backward ends", run))

    def _mark(self, name: str, run: int) -> None:
        with in_step(self.whole_step):
            mark(name, self.rank, self.device, text=str(run))


@when_tracing
def trace_ready(rank: int, bucket: int, copies: Sequence[torch.Tensor]) -> None:
    """Mark when a rank has all its gradients of a bucket, those of its copies of the parameters."""
    trainable = [copy for copy in copies if copy.requires_grad]
    if not trainable:
        return
    number, device = current_step(), trainable[0].device

    def ready(_gradients: object) -> None:
        with in_step(number):
            mark("ready", rank, device, bucket, str(torch._C._current_graph_task_id()))

    register_multi_grad_hook(trainable, ready)
