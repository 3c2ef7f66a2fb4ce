"""Broadcast and its inverse, adding up, with the signatures of ``torch.nn.parallel.comm``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_core.comm import collectives
from mgpu_core.comm.arguments import as_list, check_outs, destination_of, ordinary_list, refuse_quantized
from mgpu_core.comm.buckets import DEFAULT_NBYTES, bucket_positions
from mgpu_core.device.devices import DeviceLike
from mgpu_core.device.memory import note_written
from mgpu_core.device.team import Team
from mgpu_core.device.tensor_checks import check_alike, refuse_special
from mgpu_core.record import span

__all__ = ["broadcast", "broadcast_coalesced", "copies_of", "reduce_add", "reduce_add_coalesced"]


def copies_of(tensor: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Room for one copy per rank: the tensor itself for rank 0 where it is on that device, else fresh memory."""
    return [
        tensor if rank == 0 and device == tensor.device else torch.empty_like(tensor, device=device)
        for rank, device in enumerate(devices)
    ]


def broadcast(
    tensor: torch.Tensor,
    devices: Sequence[DeviceLike] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copies a tensor to every rank.

    Args:
        tensor: any shape and dtype; sparse too, but with ``out``.
        devices: one per rank.  Rank 0 gets the tensor itself if it is on that device already.
        out: instead of ``devices``: where to write, one per rank, of the tensor's shape and dtype.

    Raises:
        RuntimeError: both or none of ``devices`` and ``out``.
        TypeError, ValueError: tensors that cannot be read or written; ``out`` that does not fit.
    """
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got devices={devices} and out={out}"
        )
    with span("broadcast"):
        refuse_special(tensor, "tensor", sparse=out is None)
        if devices is not None:
            made = copies_of(tensor, Team.of(devices).devices)
            collectives.broadcast_into([tensor], [made])
            return tuple(made)
        assert out is not None
        refuse_quantized(tensor, "tensor")  # what is written would have codes alone, and another scale
        made = as_list(out, "out")
        check_alike(made, tensor.shape, tensor.dtype)
        check_outs([each for each in made if each is not tensor], [tensor])
        collectives.broadcast_into([tensor], [made])
        note_written([each for each in made if each is not tensor])
        return tuple(made)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[DeviceLike], buffer_size: int = DEFAULT_NBYTES
) -> list[list[torch.Tensor]]:
    """Copies many tensors to every rank: ``result[rank][i]``; see :func:`broadcast`.

    Args:
        buffer_size: bytes that travel together.
    """
    made = ordinary_list(tensors, "tensors", sparse=True)
    ranks = Team.of(devices).devices
    with span("broadcast"):
        copies = [copies_of(tensor, ranks) for tensor in made]
        for bucket in bucket_positions(made, buffer_size):
            collectives.broadcast_into([made[i] for i in bucket], [copies[i] for i in bucket])
    return [[each[rank] for each in copies] for rank in range(len(ranks))]


def _check_sizes(inputs: Sequence[torch.Tensor]) -> None:
    for i, tensor in enumerate(inputs):
        if tensor.shape != inputs[0].shape:
            got, expected = ("x".join(map(str, each.shape)) for each in (tensor, inputs[0]))
            raise ValueError(f"input {i} has invalid size: got {got}, but expected {expected}")
    check_alike(inputs, inputs[0].shape, inputs[0].dtype)


def reduce_add(inputs: Sequence[torch.Tensor], destination: DeviceLike | None = None) -> torch.Tensor:
    """Adds one tensor per rank, in rank order; half precision is added in float32 and rounded once.

    Args:
        inputs: of one shape and dtype, strided or sparse.
        destination: device of the result (default: that of ``inputs[0]``).

    Returns:
        The sum as a fresh tensor.

    Raises:
        TypeError, ValueError: tensors of several shapes or dtypes, or of a dtype that cannot be added.
    """
    return reduce_add_coalesced([[tensor] for tensor in as_list(inputs, "inputs")], destination)[0]


def reduce_add_coalesced(
    inputs: Sequence[Sequence[torch.Tensor]], destination: DeviceLike | None = None, buffer_size: int = DEFAULT_NBYTES
) -> tuple[torch.Tensor, ...]:
    """Adds many tensors, ``inputs[rank][i]`` over the ranks; see :func:`reduce_add`.

    Args:
        buffer_size: bytes that travel together.
    """
    counts = [len(each) for each in inputs]
    if len(set(counts)) > 1:
        raise ValueError(f"every rank must bring as many tensors, but inputs have {counts}")
    parts = [list(each) for each in zip(*inputs, strict=True)]
    if not counts:
        raise ValueError("inputs is empty: one list of tensors per rank is wanted")
    if not parts:
        return ()
    for each in parts:
        _check_sizes(as_list(each, "inputs"))
    device = destination_of(destination, parts[0][0].device)
    totals: dict[int, torch.Tensor] = {}
    with span("reduce"):
        for bucket in bucket_positions([each[0] for each in parts], buffer_size):
            totals.update(zip(bucket, collectives.reduce_batch([parts[i] for i in bucket], "sum", device), strict=True))
    return tuple(totals[i] for i in range(len(parts)))
