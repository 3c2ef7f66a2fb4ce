"""Linear layers that are cut over several devices.

A column layer cuts the output features, a row layer the input features::

    column: every rank has all of x       row: rank r has part r of x
            y_r = x @ W_r.T + b_r              y = sum over r of x_r @ W_r.T, + b

What a column layer computes, a row layer needs: with ``gather_output=False`` and ``input_is_parallel=True`` nothing
travels between the two.  The calling thread computes the ranks one after the other; GPUs work at the same time, because
their launches are asynchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear as linear_of

from mgpu_core.comm import autograd
from mgpu_core.comm.arguments import as_list
from mgpu_core.comm.collectives import broadcast
from mgpu_core.devices.devices import DeviceLike
from mgpu_core.devices.transfer import to_device
from mgpu_core.tensor_parallel.shards import Sharded

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ShardedLinear(Sharded):
    def _fill(self, linear: nn.Linear, device_ids: Sequence[DeviceLike], dim: int, cut: str) -> None:
        self._build(linear, nn.Linear, dim, device_ids, cut)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def _whole(self, bias: nn.Parameter | None) -> nn.Linear:
        whole = nn.Linear(self.in_features, self.out_features, bias is not None, device="meta")
        whole.weight = self._joined(self.weights)
        if bias is not None:
            whole.bias = bias
        return whole

    def _text(self, bias: object, option: str) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={bias is not None}"
        return f"{sizes}, {self._devices_text()}, {option}={getattr(self, option)}"


class ColumnParallelLinear(_ShardedLinear):
    """Compute what ``nn.Linear`` does, with the output features cut over the ranks.

    The initial values are those of an ``nn.Linear`` with the same seed.  The ``state_dict`` has one tensor per rank and
    parameter: ``weights.0`` of shape ``(features of rank 0, in_features)``, ``weights.1``, ..., ``biases.0``, ... .

    Args:
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`.
        gather_output: return one tensor on the first device; otherwise a list, the features of rank r on device r.

    Raises:
        TypeError, ValueError: a device that does not exist, or fewer output features than ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, device_ids: Sequence[DeviceLike], bias: bool = True,
        gather_output: bool = True, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._take(nn.Linear(in_features, out_features, bias, dtype=dtype), device_ids, gather_output)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, device_ids: Sequence[DeviceLike], gather_output: bool = True
    ) -> ColumnParallelLinear:
        """Return a layer with copies of the parts of a linear layer; TypeError for a module of another class."""
        layer = cls.__new__(cls)
        layer._take(linear, device_ids, gather_output)
        return layer

    def _take(self, linear: nn.Linear, device_ids: Sequence[DeviceLike], gather_output: bool) -> None:
        self._fill(linear, device_ids, 0, "out_features")
        self.gather_output = gather_output
        self.biases = None if linear.bias is None else self._cut(linear.bias)

    def to_linear(self) -> nn.Linear:
        """Return an ``nn.Linear`` with copies of the parameters, on the first device."""
        return self._whole(None if self.biases is None else self._joined(self.biases))

    def forward(self, x: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        """Return ``x @ weight.T + bias``: one tensor on the first device, or with ``gather_output=False`` one per rank.

        Args:
            x: ``(..., in_features)``, on any device: every rank gets a copy.

        Raises:
            TypeError, ValueError: not a tensor, or with another last dimension.
        """
        _check_features(x, self.in_features, "input")
        biases = self.biases or [None] * len(self.counts)
        copies = broadcast(x, self.device_ids)
        outputs = [linear_of(*each) for each in zip(copies, self.weights, biases, strict=True)]
        return autograd.gather(outputs, self.device_ids[0], x.ndim - 1) if self.gather_output else outputs

    def extra_repr(self) -> str:
        """Return the sizes and the devices."""
        return self._text(self.biases, "gather_output")


class RowParallelLinear(_ShardedLinear):
    """Compute what ``nn.Linear`` does, with the input features cut over the ranks.

    The initial values are those of an ``nn.Linear`` with the same seed.  The ``state_dict`` has one weight per rank:
    ``weights.0`` of shape ``(out_features, features of rank 0)``, ``weights.1``, ..., and one ``bias`` on the first
    device.

    Args:
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`.
        input_is_parallel: take a list, as :class:`ColumnParallelLinear` returns it with ``gather_output=False``.

    Raises:
        TypeError, ValueError: a device that does not exist, or fewer input features than ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, device_ids: Sequence[DeviceLike], bias: bool = True,
        input_is_parallel: bool = False, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._take(nn.Linear(in_features, out_features, bias, dtype=dtype), device_ids, input_is_parallel)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, device_ids: Sequence[DeviceLike], input_is_parallel: bool = False
    ) -> RowParallelLinear:
        """Return a layer with copies of the parts of a linear layer; TypeError for a module of another class."""
        layer = cls.__new__(cls)
        layer._take(linear, device_ids, input_is_parallel)
        return layer

    def _take(self, linear: nn.Linear, device_ids: Sequence[DeviceLike], input_is_parallel: bool) -> None:
        self._fill(linear, device_ids, 1, "in_features")
        self.input_is_parallel, self.bias = input_is_parallel, self._on_first(linear.bias)

    def to_linear(self) -> nn.Linear:
        """Return an ``nn.Linear`` with copies of the parameters, on the first device."""
        return self._whole(self._on_first(self.bias))

    def _on_first(self, bias: nn.Parameter | None) -> nn.Parameter | None:
        """Return a Parameter with a copy of the values on the first device."""
        if bias is None:
            return None
        return nn.Parameter(to_device(bias.detach(), self.device_ids[0], copy=True), bias.requires_grad)

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` on the first device; partial sums are added in rank order.

        Args:
            x: ``(..., in_features)``, on any device; with ``input_is_parallel`` a list, the features of rank r on
                device r.

        Raises:
            TypeError, ValueError: not a tensor, or not one per rank; another last dimension; a part on another device.
        """
        parts = self._checked_parts(x) if self.input_is_parallel else self._parts_of(x)
        total = self._summed([linear_of(part, weight) for part, weight in zip(parts, self.weights, strict=True)])
        return total if self.bias is None else total + self.bias.to(total.dtype)  # autocast: the sum may be in half

    def _parts_of(self, x: Any) -> Sequence[torch.Tensor]:
        _check_features(x, self.in_features, "input")
        return autograd.scatter(x, self._team.devices, self.counts, -1)

    def _checked_parts(self, x: Any) -> list[torch.Tensor]:
        parts = as_list(x, "input")
        if len(parts) != len(self.counts):
            raise ValueError(f"input must have one tensor per rank: {len(self.counts)} ranks, {len(parts)} tensors")
        for rank, (part, count, device) in enumerate(zip(parts, self.counts, self.device_ids, strict=True)):
            _check_features(part, count, f"input[{rank}]")
            if part.device != device:
                raise ValueError(f"input[{rank}] must be on {device}, the device of its rank, but is on {part.device}")
        return parts

    def extra_repr(self) -> str:
        """Return the sizes and the devices."""
        return self._text(self.bias, "input_is_parallel")


def _check_features(x: Any, features: int, name: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(f"the last dimension of {name} must be {features}, but its shape is {tuple(x.shape)}")
