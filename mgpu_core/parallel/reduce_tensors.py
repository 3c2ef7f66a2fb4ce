"""Reduce: one nested object per rank becomes one, its tensors added up.

Reduce adds up losses, counts or statistics that each rank took over its own rows, as gather joins rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.comm import autograd
from mgpu_core.comm.reductions import check_op
from mgpu_core.devices.devices import DeviceLike, as_device
from mgpu_core.devices.tensor_checks import check_alike
from mgpu_core.devices.traces import refuse_traces
from mgpu_core.trace.tracer import span
from mgpu_core.trees.nested import flatten_alike

__all__ = ["reduce"]


def reduce(outputs: Sequence[Any], target_device: DeviceLike) -> Any:
    """Add the ranks' tensors up, in rank order, on ``target_device``; differentiable: its gradient is a broadcast.

    Args:
        outputs: one nest of tensors per rank, all of one structure, shapes and dtypes.
        target_device: where the sums are wanted.

    Returns:
        A nest like ``outputs[0]`` with the sums, in fresh memory.

    Raises:
        ValueError: structures, shapes or dtypes that differ between ranks.
        TypeError: a leaf that is not a tensor, or of a dtype that cannot be added.
    """
    refuse_traces()
    device = as_device(target_device)
    if not len(outputs):
        raise ValueError("reduce needs the output of at least one rank")
    tree, rows = flatten_alike(outputs, "outputs")
    for row in rows:
        for index, leaf in enumerate(row):
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"{tree.paths('outputs')[index]} is {leaf!r}, and only tensors can be added up")
    for column in zip(*rows, strict=True):
        check_alike(column, column[0].shape, column[0].dtype)
        check_op("sum", column[0].dtype)
    with span("reduce"):
        return tree.unflatten(iter(autograd.reduce_tensors(rows, device)))
