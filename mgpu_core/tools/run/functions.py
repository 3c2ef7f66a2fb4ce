"""Stand-ins for the autograd functions of ``torch.nn.parallel._functions``, which wrappers of other people call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.comm import autograd
from mgpu_core.devices.devices import as_device, as_devices
from mgpu_core.devices.drop_in import drop_in_devices
from mgpu_core.parallel.scatter_inputs import row_counts

__all__ = ["Broadcast", "Gather", "ReduceAddCoalesced", "Scatter"]


class Scatter:
    """``Scatter.apply(target_gpus, chunk_sizes, dim, input)``: one chunk per rank."""

    @staticmethod
    def apply(
        target_gpus: Sequence[Any],
        chunk_sizes: Sequence[int] | None,
        dim: int,
        input: torch.Tensor,  # noqa: A002
    ) -> tuple[torch.Tensor, ...]:
        """Return the chunks; differentiable."""
        devices = as_devices(drop_in_devices(list(target_gpus), None))
        counts = list(chunk_sizes) if chunk_sizes else row_counts(input.size(dim), len(devices), None)
        return autograd.scatter(input, devices[: len(counts)], counts, dim)


class Gather:
    """``Gather.apply(target_device, dim, *inputs)``: the tensors of all ranks, joined."""

    @staticmethod
    def apply(target_device: Any, dim: int, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the tensors joined along ``dim``, numbers as a vector; differentiable."""
        device = as_device("cpu") if target_device in ("cpu", -1) else drop_in_devices([target_device], None)[0]
        parts = [each.reshape(1) if not each.dim() and dim == 0 else each for each in inputs]
        return autograd.gather(parts, device, dim % parts[0].dim())


class Broadcast:
    """``Broadcast.apply(target_gpus, *inputs)``: all tensors of the first rank, then all of the second, and so on."""

    @staticmethod
    def apply(target_gpus: Sequence[Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the copies; differentiable."""
        devices = as_devices(drop_in_devices(list(target_gpus), None))
        rows = autograd.broadcast_buckets(devices, list(inputs), numbered=False)
        return tuple(copy for row in rows for copy in row)


class ReduceAddCoalesced:
    """``ReduceAddCoalesced.apply(destination, num_inputs, *grads)``: sums over the ranks."""

    @staticmethod
    def apply(destination: Any, num_inputs: int, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return ``num_inputs`` sums of ``grads``, which has as many for each rank; differentiable."""
        device = drop_in_devices([destination], None)[0]
        rows = [grads[begin : begin + num_inputs] for begin in range(0, len(grads), num_inputs)]
        return autograd.reduce_tensors(rows, device)
