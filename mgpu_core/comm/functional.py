"""The collectives as people call them: the signatures of ``torch.nn.parallel.comm``, and three more.

No function here is differentiable (:mod:`mgpu_core.comm.autograd` is).  A device may be the CPU, and may come more than
once: one entry of a list is one rank.  Tensors on an accelerator are read and written on the current streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.comm import collectives
from mgpu_core.comm.buckets import DEFAULT_NBYTES, bucket_positions
from mgpu_core.comm.checks import check_disjoint, check_writable, refuse_special
from mgpu_core.comm.layout import empty_in_order, memory_order
from mgpu_core.device.devices import DeviceLike, as_device
from mgpu_core.device.memory import note_written
from mgpu_core.device.team import Team
from mgpu_core.record import span

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "reduce_add",
    "reduce_add_coalesced",
    "reduce_scatter",
    "scatter",
]


def _as_list(tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{what} is a sequence with one tensor per rank, not a tensor")
    made = list(tensors)
    if not made:
        raise ValueError(f"{what} is empty: one tensor per rank is wanted")
    for rank, tensor in enumerate(made):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what}[{rank}] must be a tensor, not {type(tensor).__name__}")
    return made


def _check_outs(outs: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    names = [f"out[{rank}]" for rank in range(len(outs))]
    for out, name in zip(outs, names, strict=True):
        check_writable(out, name)
    check_disjoint(outs, names, read)


def _in_range(dim: int, dims: int) -> int:
    if not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")
    return dim % dims


def copies_of(tensor: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Room for one copy per rank: the tensor itself for rank 0 where it is on that device, else fresh memory."""
    order = memory_order(tensor)
    return [
        tensor if rank == 0 and device == tensor.device else empty_in_order(tensor, tensor.shape, device, order)
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
        tensor: any shape and dtype.
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
        refuse_special(tensor, "tensor")
        if devices is not None:
            made = copies_of(tensor, Team.of(devices).devices)
            collectives.broadcast_into([tensor], [made])
            return tuple(made)
        made = _as_list(out or [], "out")
        collectives.check_alike(made, tensor.shape, tensor.dtype)
        _check_outs([each for each in made if each is not tensor], [tensor])
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
    made = _as_list(tensors, "tensors")
    ranks = Team.of(devices).devices
    for i, tensor in enumerate(made):
        refuse_special(tensor, f"tensors[{i}]")
    with span("broadcast"):
        copies = [copies_of(tensor, ranks) for tensor in made]
        for bucket in bucket_positions(made, buffer_size):
            collectives.broadcast_into([made[i] for i in bucket], [copies[i] for i in bucket])
    return [[each[rank] for each in copies] for rank in range(len(ranks))]


def _destination(destination: DeviceLike | None, default: torch.device) -> torch.device:
    return default if destination is None else as_device(destination)


def _check_sizes(inputs: Sequence[torch.Tensor]) -> None:
    for i, tensor in enumerate(inputs):
        if tensor.shape != inputs[0].shape:
            got, expected = ("x".join(map(str, each.shape)) for each in (tensor, inputs[0]))
            raise ValueError(f"input {i} has invalid size: got {got}, but expected {expected}")
    collectives.check_alike(inputs, inputs[0].shape, inputs[0].dtype)


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
    return reduce_add_coalesced([[tensor] for tensor in _as_list(inputs, "inputs")], destination)[0]


def reduce_add_coalesced(
    inputs: Sequence[Sequence[torch.Tensor]], destination: DeviceLike | None = None, buffer_size: int = DEFAULT_NBYTES
) -> tuple[torch.Tensor, ...]:
    """Adds many tensors, ``inputs[rank][i]`` over the ranks; see :func:`reduce_add`.

    Args:
        buffer_size: bytes that travel together.
    """
    parts = [list(each) for each in zip(*inputs, strict=True)]
    if not parts:
        raise ValueError("inputs is empty: one list of tensors per rank is wanted")
    for each in parts:
        _check_sizes(_as_list(each, "inputs"))
    device = _destination(destination, parts[0][0].device)
    totals: dict[int, torch.Tensor] = {}
    with span("reduce"):
        for bucket in bucket_positions([each[0] for each in parts], buffer_size):
            totals.update(zip(bucket, collectives.reduce_batch([parts[i] for i in bucket], "sum", device), strict=True))
    return tuple(totals[i] for i in range(len(parts)))


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[DeviceLike] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Cuts a tensor along ``dim`` into one chunk per rank, each in fresh memory on its device.

    Args:
        tensor: any dtype, at least one dimension.
        devices: one per rank.
        chunk_sizes: rows of each chunk (default: sizes that differ by at most one; with fewer rows than ranks the
            first ranks get one each and the others none).
        streams: taken for compatibility; the copies are ordered on the current streams.
        out: instead of ``devices``: where to write, one per rank; their sizes along ``dim`` are the chunks.

    Raises:
        RuntimeError: ``out`` together with ``devices`` or ``chunk_sizes``.
        IndexError, TypeError, ValueError: a ``dim`` that is not there, sizes that do not add up, tensors that cannot
            be read or written.
    """
    refuse_special(tensor, "tensor")
    dim = _in_range(dim, tensor.dim())
    if out is not None:
        return _scatter_out(tensor, devices, chunk_sizes, dim, _as_list(out, "out"))
    if devices is None:
        raise RuntimeError("Exactly one of 'devices' and 'out' must be specified, but got neither")
    ranks = Team.of(devices).devices
    if chunk_sizes is None:
        chunk_sizes = [count for _, count in _core.chunk_plan(tensor.size(dim), len(ranks)) if count] or [0]
        ranks = ranks[: len(chunk_sizes)]
    if len(chunk_sizes) != len(ranks) or sum(chunk_sizes) != tensor.size(dim) or min(chunk_sizes) < 0:
        raise ValueError(
            f"chunk_sizes must be {len(ranks)} sizes that add up to {tensor.size(dim)}, not {list(chunk_sizes)}"
        )
    with span("scatter"):
        order = memory_order(tensor)
        shapes = [(*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]) for rows in chunk_sizes]
        parts = [empty_in_order(tensor, shape, rank, order) for shape, rank in zip(shapes, ranks, strict=True)]
        collectives.scatter_into(tensor, parts, dim)
    return tuple(parts)


def _scatter_out(
    tensor: torch.Tensor, devices: object, chunk_sizes: object, dim: int, out: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    for name, value in (("devices", devices), ("chunk_sizes", chunk_sizes)):
        if value is not None:
            raise RuntimeError(f"'{name}' must not be specified when 'out' is specified, but got {name}={value}")
    _check_joined(out, tensor, dim, "out")
    _check_outs(out, [tensor])
    with span("scatter"):
        collectives.scatter_into(tensor, out, dim)
        note_written(out)
    return tuple(out)


def _check_joined(parts: Sequence[torch.Tensor], whole: torch.Tensor, dim: int, what: str) -> None:
    """Raises ValueError unless the parts, joined along ``dim``, have the shape and dtype of the whole."""
    for rank, part in enumerate(parts):
        wanted = (*whole.shape[:dim], part.size(dim) if part.dim() > dim else 0, *whole.shape[dim + 1 :])
        if tuple(part.shape) != wanted or part.dtype != whole.dtype:
            raise ValueError(
                f"{what}[{rank}] is {tuple(part.shape)} {part.dtype}, which does not fit {tuple(whole.shape)} "
                f"{whole.dtype} along dimension {dim}"
            )
    rows = sum(part.size(dim) for part in parts)
    if rows != whole.size(dim):
        raise ValueError(f"{what} has {rows} rows along dimension {dim} together, wanted {whole.size(dim)}")


def gather(
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    destination: DeviceLike | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Joins one tensor per rank along ``dim``, copied straight into the result.

    Args:
        tensors: of one dtype, and one shape but for ``dim``.
        destination: device of the result (default: that of ``tensors[0]``).
        out: instead of ``destination``: where to write.

    Raises:
        RuntimeError: both ``destination`` and ``out``.
        IndexError, TypeError, ValueError: tensors that do not fit, or cannot be read or written.
    """
    parts = _as_list(tensors, "tensors")
    for rank, part in enumerate(parts):
        refuse_special(part, f"tensors[{rank}]")
    dim = _in_range(dim, parts[0].dim())
    if out is None:
        return _gather_new(parts, dim, _destination(destination, parts[0].device))
    if destination is not None:
        raise RuntimeError(f"'destination' must not be specified when 'out' is specified, but got destination={destination}")
    _check_joined(parts, out, dim, "tensors")
    _check_outs([out], parts)
    with span("gather"):
        collectives.gather_into(parts, out, dim)
        note_written([out])
    return out


def _gather_new(parts: list[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    first = parts[0]
    rows = sum(part.size(dim) if part.dim() > dim else 0 for part in parts)
    whole = empty_in_order(first, (*first.shape[:dim], rows, *first.shape[dim + 1 :]), device, memory_order(first))
    _check_joined(parts, whole, dim, "tensors")
    with span("gather"):
        collectives.gather_into(parts, whole, dim)
    return whole


def all_reduce(tensors: Sequence[torch.Tensor], op: str = "sum", *, algorithm: str = "auto") -> None:
    """Reduces one tensor per rank, in place: afterwards all hold the same bits.

    Args:
        tensors: of one shape and dtype (float16, bfloat16, float32, float64, int32, int64, uint8; int8 and int16 by
            plain torch; complex for sum and avg), none sharing memory with another.
        op: ``sum``, ``avg``, ``prod``, ``min`` or ``max``.  Integers wrap and ``avg`` divides the wrapped sum, toward
            zero.  NaN wins in ``min`` and ``max``.
        algorithm: ``naive`` (into rank 0, then to all) and ``direct`` (each element once, from all ranks to all) add
            in rank order, half precision in float32 rounded once.  ``ring`` adds chunk c in the order c, c + 1, ...,
            c - 1; ``tree`` as ((0 + 1) + (2 + 3)) + ...; both round at each hop.  ``auto`` is ``direct`` on the CPU.
            The generic room (other devices, mixed teams) has one algorithm, in rank order.

    Raises:
        TypeError, ValueError: before anything is written.
    """
    with span("all_reduce"):
        collectives.all_reduce_into(_as_list(tensors, "tensors"), op, algorithm)


def all_gather(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gives every rank all tensors, joined along dimension 0: one fresh tensor per rank, on its device.

    Args:
        tensors: one per rank, of one dtype, and one shape but for dimension 0.
    """
    parts = _as_list(tensors, "tensors")
    for rank, part in enumerate(parts):
        refuse_special(part, f"tensors[{rank}]")
        if part.dim() == 0:
            raise ValueError(f"tensors[{rank}] has no dimension to join along")
    rows = sum(part.size(0) for part in parts)
    wholes = [parts[0].new_empty((rows, *parts[0].shape[1:]), device=part.device) for part in parts]
    _check_joined(parts, wholes[0], 0, "tensors")
    with span("all_gather"):
        collectives.all_gather_into(parts, wholes)
    return wholes


def reduce_scatter(tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Reduces one tensor per rank and gives rank r chunk r of the result, along dimension 0, in fresh memory.

    Args:
        tensors: of one shape and dtype; the size of dimension 0 is a multiple of the number of ranks.
        op: as in :func:`all_reduce`; added in rank order.
    """
    parts = _as_list(tensors, "tensors")
    for rank, part in enumerate(parts):
        refuse_special(part, f"tensors[{rank}]")
    first = parts[0]
    collectives.check_alike(parts, first.shape, first.dtype)
    if first.dim() == 0 or first.size(0) % len(parts):
        raise ValueError(f"dimension 0 of {tuple(first.shape)} cannot be cut into {len(parts)} equal chunks")
    shape = (first.size(0) // len(parts), *first.shape[1:])
    outs = [first.new_empty(shape, device=part.device) for part in parts]
    with span("reduce_scatter"):
        collectives.reduce_scatter_into(parts, outs, op)
    return outs
