"""Outputs of all ranks as one device would have them.

Tensors with a row per row are joined.  A number that a forward computes (a temperature, a mean of its rows) is averaged
by rows: equal ones stay what they are, and a mean becomes the mean of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from mgpu_core.devices.transfer import to_device
from mgpu_core.parallel.gather_outputs import joined
from mgpu_core.step.window import total_of, weighted_mean
from mgpu_core.trace.tracer import span
from mgpu_core.trees.comparison import equal
from mgpu_core.trees.nested import Rows

__all__ = ["UnjoinedError", "gathered", "joined_plainly"]

_HOST = torch.device("cpu")


class UnjoinedError(Exception):
    """Outputs of which nothing says what one device would have in their place."""


def gathered(outputs: Sequence[Any], rows: Sequence[int], device: torch.device, dim: int) -> Any:
    """Gather the outputs on a device, and average floating-point numbers (0-d tensors) by rows; differentiable.

    Other numbers stay as they are where all ranks have the same, for which the host waits.

    Raises:
        Exception: as :func:`mgpu_core.gather`.
    """

    def join_numbers(column: Sequence[Any], _path: Callable[[], str]) -> Any:
        if not _are_numbers(column):
            return NotImplemented
        if column[0].is_floating_point():
            return weighted_mean(column, rows, device)
        return column[0] if len({each.item() for each in column}) == 1 else NotImplemented

    with span("gather"):
        return joined(outputs, device, dim, join_numbers)


def joined_plainly(outputs: Sequence[Any], rows: Sequence[int], dim: int, *, adds: bool = False) -> Any:
    """Join outputs where rank 0 has them, by torch alone: a recording and the counters do not see it.

    Args:
        adds: numbers are added, as sums over the rows are, and not averaged.

    Raises:
        UnjoinedError: a leaf that is neither rows, nor a floating-point number, nor the same for all ranks.
    """

    def join(column: Sequence[Any], path: Callable[[], str]) -> Any:
        first = column[0]
        device = getattr(first, "device", _HOST)
        if _are_numbers(column) and first.is_floating_point():
            return (
                total_of([to_device(each, device) for each in column]) if adds else weighted_mean(column, rows, device)
            )
        if all(isinstance(each, torch.Tensor) for each in column):
            if all(_rows_of(each, dim) == count for each, count in zip(column, rows, strict=True)):
                return torch.cat([to_device(each, device) for each in column], dim)
            raise UnjoinedError(f"{path()} has no row for each row of the inputs")
        if all(isinstance(each, Rows) for each in column):
            return list(chain.from_iterable(column))
        if (first is None or isinstance(first, str | bool)) and all(equal(first, each) for each in column):
            return first
        raise UnjoinedError(f"{path()} is a {type(first).__name__}")

    return joined(outputs, _HOST, dim, join)  # which leaves nothing to gather


def _are_numbers(column: Sequence[Any]) -> bool:
    return all(isinstance(each, torch.Tensor) and not each.dim() for each in column)


def _rows_of(tensor: torch.Tensor, dim: int) -> int:
    return tensor.size(dim) if -tensor.dim() <= dim < tensor.dim() else -1
