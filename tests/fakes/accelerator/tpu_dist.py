"""``tpu_dist``, the backend of ``torch.distributed`` that the plug-in for TPUs registers: here gloo, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.futures import Future


class _OverHost(distributed.ProcessGroup):
    def __init__(self, store: distributed.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._host = distributed.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return "tpu_dist"

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> Any:
        return self._done(tensors, lambda copies: self._host.allreduce(copies, options))

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Any:
        return self._done(tensors, lambda copies: self._host.broadcast(copies, options))

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], options: Any
    ) -> Any:
        sent = [tensor.cpu() for tensor in tensors]
        return self._done(outputs[0], lambda copies: self._host.allgather([copies], sent, options))

    def _done(self, tensors: Sequence[torch.Tensor], collective: Callable[[list[torch.Tensor]], Any]) -> Any:
        copies = [tensor.cpu() for tensor in tensors]
        collective(copies).wait()
        for tensor, copied in zip(tensors, copies, strict=True):
            tensor.copy_(copied)
        future: Future[Any] = Future()
        future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)


def register() -> None:
    """Make it the backend of ``torch.distributed`` for the accelerator of this process."""
    distributed.Backend.register_backend("tpu_dist", _OverHost, devices=["tpu"])
