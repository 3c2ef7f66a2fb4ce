"""Scatter and gather, broadcast and reduce, as pairs of autograd functions.

The gradient of scattering is gathering, the gradient of broadcasting is adding up, and the other way round.  Each is
written in terms of the other, so double backward works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad

from mgpu_core.comm import dispatch
from mgpu_core.comm.buckets import bucket_positions
from mgpu_core.comm.trace_hooks import trace_cut, trace_ready
from mgpu_core.devices.streams import caller_streams, resumed_on_all
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer
from mgpu_core.trace.events import ALL_RANKS, GATHER_BACK, NO_BUCKET, SCATTER_BACK
from mgpu_core.trace.tracer import current_step, in_step, span

__all__ = ["broadcast_buckets", "gather", "gradient_buckets", "reduce_tensors", "scatter"]

Devices: TypeAlias = Sequence[torch.device]
_Grad: TypeAlias = torch.Tensor | None


def _streams_of(devices: Devices) -> list[torch.Stream | None] | None:
    """Return the current stream of each rank's device, for :func:`_resumed`; ``None`` on the host."""
    for device in devices:
        if device.type != "cpu":
            return caller_streams(devices)
    return None


def _resumed(ctx: Any, step: str, bucket: int = NO_BUCKET) -> AbstractContextManager[None]:
    """Go on in the whole step and on the streams of a forward, in its backward, and open a span."""
    if ctx.streams is None and tracer.sink is None:
        return NULL_CONTEXT
    return _resumed_in_span(ctx, step, bucket)


@contextmanager
def _resumed_in_span(ctx: Any, step: str, bucket: int) -> Iterator[None]:
    streams = NULL_CONTEXT if ctx.streams is None else resumed_on_all(ctx.devices, ctx.streams)
    with in_step(ctx.whole_step), span(step, ALL_RANKS, None, bucket), streams:
        yield


def _has_graph(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether an operation on these is part of a graph, or of a forward-mode derivative, which is refused."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def _devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    return [tensor.device for tensor in tensors]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, devices: Devices, counts: Sequence[int], dim: int, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.source, ctx.whole_step = dim, tensor.device, current_step()
        ctx.devices, ctx.streams = devices, _streams_of(devices)
        return dispatch.scatter(tensor, devices, counts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        with _resumed(ctx, GATHER_BACK):
            whole = gather(grads, ctx.source, ctx.dim)
            if tracer.recording is not None:
                trace_cut(GATHER_BACK, "gradient of the input", ctx.source, grads, ctx.dim)
            return None, None, None, whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, device: torch.device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.counts, ctx.devices = dim, [tensor.shape[dim] for tensor in tensors], _devices_of(tensors)
        ctx.streams, ctx.whole_step = _streams_of(ctx.devices), current_step()
        return dispatch.gather(tensors, dim, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with _resumed(ctx, SCATTER_BACK):
            parts = scatter(grad, ctx.devices, ctx.counts, ctx.dim)
            if tracer.recording is not None:
                trace_cut(SCATTER_BACK, "gradient of the output", grad.device, parts, ctx.dim)
            return None, None, *parts


def scatter(tensor: torch.Tensor, devices: Devices, counts: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
    """Return ``counts[rank]`` rows along ``dim`` on each rank's device, in fresh memory; differentiable."""
    dim = dim + tensor.ndim if dim < 0 else dim
    if not _has_graph((tensor,)):
        return dispatch.scatter(tensor, devices, counts, dim)
    parts: tuple[torch.Tensor, ...] = _Scatter.apply(devices, counts, dim, tensor)
    return parts


def gather(tensors: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    """Return the tensors joined along ``dim`` (not negative) on ``device``; differentiable."""
    if not _has_graph(tensors):
        return dispatch.gather(tensors, dim, device)
    whole: torch.Tensor = _Gather.apply(device, dim, *tensors)
    return whole


class _Broadcast(torch.autograd.Function):
    """A bucket of tensors to all ranks.  Outputs are flat, rank by rank: rank 0's are the tensors' own storage."""

    @staticmethod
    def forward(ctx: Any, devices: Devices, bucket: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that no rank used gets no gradient, not a zero one
        ctx.bucket, ctx.whole_step = bucket, current_step()
        ctx.devices, ctx.source, ctx.streams = devices, tensors[0].device, _streams_of(devices)
        copies = dispatch.broadcast(tensors, devices)
        # An alias of rank 0's, not the input: it shares the version counter, so an optimizer's step between forward
        # and backward is noticed as on one device, but it is no view that refuses to be written.
        for tensor, row in zip(tensors, copies, strict=True):
            if row[0] is tensor:
                row[0] = tensor.detach()
        return tuple([row[rank] for rank in range(len(devices)) for row in copies])

    @staticmethod
    def backward(ctx: Any, *grads: _Grad) -> tuple[_Grad, ...]:
        with _resumed(ctx, "reduce", ctx.bucket):
            if torch.is_grad_enabled():  # a graph of the gradients is wanted
                return None, None, *_Reduce.apply(ctx.devices, ctx.source, *grads)
            return None, None, *_sums(len(ctx.devices), ctx.source, grads)


def _sums(ranks: int, device: torch.device, grads: Sequence[_Grad]) -> list[_Grad]:
    """Return the sums over the ranks of gradients in the order of :class:`_Broadcast`'s outputs."""
    tensors = len(grads) // ranks
    rows = [grads[i::tensors] for i in range(tensors)]
    present = [i for i, row in enumerate(rows) if [each for each in row if each is not None]]
    totals: list[_Grad] = [None] * tensors
    for i, total in zip(present, dispatch.reduce_batch([rows[i] for i in present], "sum", device), strict=True):
        totals[i] = total
    return totals


class _Reduce(torch.autograd.Function):
    """The sums over the ranks of gradients in the order of :class:`_Broadcast`'s outputs; ``None`` adds nothing."""

    @staticmethod
    def forward(ctx: Any, devices: Devices, device: torch.device, *grads: _Grad) -> tuple[_Grad, ...]:
        ctx.set_materialize_grads(False)
        ctx.devices, ctx.streams, ctx.whole_step = devices, _streams_of(devices), current_step()
        return tuple(_sums(len(devices), device, grads))

    @staticmethod
    def backward(ctx: Any, *grads: _Grad) -> tuple[_Grad, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        flat: list[_Grad] = [None] * (len(grads) * len(ctx.devices))
        if present:
            with _resumed(ctx, "broadcast"):
                copies = _Broadcast.apply(ctx.devices, NO_BUCKET, *(grads[i] for i in present))
            for position, copy in enumerate(copies):
                rank, i = divmod(position, len(present))
                flat[rank * len(grads) + present[i]] = copy
        # A rank that had nothing to add, gets nothing.
        return None, None, *(each if need else None for each, need in zip(flat, ctx.needs_input_grad[2:], strict=True))


def reduce_tensors(rows: Sequence[Sequence[torch.Tensor]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the sums over the ranks of ``rows[rank][i]``, on ``device``; differentiable."""
    devices = [row[0].device if row else device for row in rows]
    totals: tuple[torch.Tensor, ...] = _Reduce.apply(devices, device, *(tensor for row in rows for tensor in row))
    return totals


_FIRST = 2**62  # above every number that the engine gives out, below the one of gradient accumulation


def gradient_buckets(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return which tensors travel together, by position, from the last to the first, as backward makes gradients."""
    last = len(tensors) - 1
    return [[last - i for i in bucket] for bucket in bucket_positions(tensors[::-1])]


def broadcast_buckets(
    devices: Devices, tensors: Sequence[torch.Tensor], *, numbered: bool = True
) -> list[list[torch.Tensor]]:
    """Differentiable copies of many tensors: ``result[rank][i]``; their gradients are summed bucket by bucket.

    In a recording these are the buckets of the parameters, unless they are not ``numbered``.

    One autograd node per bucket of :func:`gradient_buckets`.
    The engine gives nodes that are made before the forward the lowest priority, so all of them would run last.  Their
    priority is raised: a bucket is reduced as soon as its gradients are there.
    """
    ranks = range(len(devices))
    result: list[list[torch.Tensor]] = [[torch.Tensor()] * len(tensors) for _ in ranks]
    for position, positions in enumerate(gradient_buckets(tensors)):
        bucket = position if numbered else NO_BUCKET
        originals = [tensors[i] for i in positions]
        with NULL_CONTEXT if tracer.sink is None else span("broadcast", ALL_RANKS, None, bucket):
            copies: tuple[torch.Tensor, ...] = _Broadcast.apply(devices, bucket, *originals)
        _raise_priority(copies, _FIRST - position)
        if tracer.recording is not None and numbered:
            for rank in ranks:
                trace_ready(rank, position, copies[rank * len(positions) :][: len(positions)])
        for rank in ranks:
            for i, copy in zip(positions, copies[rank * len(positions) :], strict=False):
                result[rank][i] = copy
    return result


def _raise_priority(outputs: Sequence[torch.Tensor], number: int) -> None:
    node = outputs[0].grad_fn
    if node is not None and hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(number)
