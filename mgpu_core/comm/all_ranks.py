"""The public collectives that leave a result on every rank: each checks its arguments once, like ``api.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_core.comm import dispatch
from mgpu_core.comm.arguments import as_list, check_joined, rank_name, readable_list
from mgpu_core.comm.reductions import check_op
from mgpu_core.devices.shared_memory import check_disjoint
from mgpu_core.devices.tensor_checks import check_alike, check_writable
from mgpu_core.trace.tracer import span

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_reduce(
    tensors: Sequence[torch.Tensor], op: str = "sum", *, algorithm: str = "auto", merge_shared_devices: bool = True
) -> None:
    """Reduce one tensor per rank, in place: afterwards all hold the same bits.

    Args:
        tensors: of one shape and dtype (float16, bfloat16, float32, float64, int32, int64, uint8; int8 and int16 by
            plain torch; complex for sum and avg), none sharing memory with another.
        op: ``sum``, ``avg``, ``prod``, ``min`` or ``max``.  Integers wrap and ``avg`` divides the wrapped sum, toward
            zero.  NaN wins in ``min`` and ``max``.
        algorithm: ``naive`` (into rank 0, then to all) and ``direct`` (each element once, from all ranks to all) add
            in rank order, half precision in float32 rounded once.  ``ring`` adds chunk c in the order c, c + 1, ...,
            c - 1; ``tree`` as ((0 + 1) + (2 + 3)) + ...; both round at each hop.  ``push`` is for small tensors on GPUs
            that reach each other, one rank each: one launch a rank, which sends its values to all others and adds up
            those that came, with the bits of ``direct``.  ``nccl`` is NCCL's, between GPUs, in an order of its own; its
            ``min`` and ``max`` may drop a NaN.  ``auto`` is ``direct`` on the CPU, and on GPUs the fastest here for
            such a size (measured at first use for at most a second, and kept; see ``mgpu doctor``), but never
            ``nccl`` for ``min`` and ``max``.  Plain torch (other devices, mixed teams) has one algorithm, in rank
            order.
        merge_shared_devices: for ``ring``, ``tree`` and ``nccl``, ranks that share a GPU are added there first, in
            rank order; without it each counts as a device of its own (not for ``nccl``).

    Raises:
        TypeError, ValueError: before anything is written.
        BackendUnavailable: ``nccl`` or ``push`` on the CPU, while a graph is captured, or where it cannot run.
        Error: an earlier ``push`` was given up, because a GPU did not come to it; its floating results are NaN, and its
            integers are not summed.  A later call makes a new team.
        NcclError: NCCL failed; a later call makes a new team of communicators.
    """
    tensors = as_list(tensors, "tensors")
    with span("all_reduce"):
        check_writable(tensors, rank_name)
        check_alike(tensors, tensors[0].shape, tensors[0].dtype)
        check_op(op, tensors[0].dtype, algorithm)
        check_disjoint(tensors, rank_name)
        dispatch.all_reduce_into(tensors, op, algorithm, merge_shared_devices)


def all_gather(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give every rank all tensors, joined along dimension 0: one fresh tensor per rank, on its device.

    Args:
        tensors: one per rank, of one dtype, and one shape but for dimension 0.
    """
    parts = readable_list(tensors, "tensors")
    for rank, part in enumerate(parts):
        if part.dim() == 0:
            raise ValueError(f"tensors[{rank}] has no dimension to join along")
    shape = check_joined(parts, 0, "tensors")
    wholes = [parts[0].new_empty(shape, device=part.device) for part in parts]
    with span("all_gather"):
        dispatch.all_gather_into(parts, wholes)
    return wholes


def reduce_scatter(tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Reduce one tensor per rank and give rank r chunk r of the result, along dimension 0, in fresh memory.

    Args:
        tensors: of one shape and dtype; the size of dimension 0 is a multiple of the number of ranks.
        op: as in :func:`all_reduce`; added in rank order.
    """
    parts = readable_list(tensors, "tensors")
    first = parts[0]
    check_alike(parts, first.shape, first.dtype)
    check_op(op, first.dtype)
    if first.dim() == 0 or first.size(0) % len(parts):
        raise ValueError(f"dimension 0 of {tuple(first.shape)} cannot be cut into {len(parts)} equal chunks")
    shape = (first.size(0) // len(parts), *first.shape[1:])
    outs = [first.new_empty(shape, device=part.device) for part in parts]
    with span("reduce_scatter"):
        dispatch.reduce_scatter_into(parts, outs, op)
    return outs
