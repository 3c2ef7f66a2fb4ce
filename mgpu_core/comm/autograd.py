"""Scatter and gather, broadcast and reduce, as pairs of autograd functions.

The gradient of scattering is gathering, the gradient of broadcasting is adding up, and the other way round.  Each is
written in terms of the other, so double backward works.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad

from mgpu_core.comm import dispatch
from mgpu_core.comm.buckets import bucket_positions
from mgpu_core.comm.trace_hooks import trace_cut, trace_ready
from mgpu_core.devices.streams import caller_streams, resumed_on_all
from mgpu_core.ranks.team import Team
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace.events import ALL_RANKS, GATHER_BACK, NO_BUCKET, SCATTER_BACK
from mgpu_core.trace.tracer import current_step, in_step, is_tracing, span

__all__ = ["broadcast_buckets", "gather", "gradient_buckets", "reduce_tensors", "scatter"]

_Grad = torch.Tensor | None


def _streams_of(team: Team) -> list[torch.Stream | None] | None:
    """Return the current stream of each rank's device, for :func:`_resumed`; ``None`` on the host."""
    return None if team.on_host else caller_streams(team.devices)


def _resumed(team: Team, streams: list[torch.Stream | None] | None) -> AbstractContextManager[None]:
    """Make the streams of a forward pass current again, in its backward pass."""
    return NULL_CONTEXT if streams is None else resumed_on_all(team.devices, streams)


def _has_graph(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether an operation on these is part of a graph, or of a forward-mode derivative, which is refused."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, team: Team, counts: Sequence[int], dim: int, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.source, ctx.whole_step = dim, tensor.device, current_step()
        ctx.team, ctx.streams = team, _streams_of(team)
        return dispatch.scatter(tensor, team, counts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        with in_step(ctx.whole_step), span(GATHER_BACK), _resumed(ctx.team, ctx.streams):
            whole = _gathered(grads, ctx.team, ctx.source, ctx.dim)
            trace_cut(GATHER_BACK, "gradient of the input", ctx.source, grads, ctx.dim)
            return None, None, None, whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, team: Team, device: torch.device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.counts = dim, [tensor.shape[dim] for tensor in tensors]
        ctx.team, ctx.streams, ctx.whole_step = team, _streams_of(team), current_step()
        return dispatch.gather(tensors, dim, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with in_step(ctx.whole_step), span(SCATTER_BACK), _resumed(ctx.team, ctx.streams):
            parts = scatter(grad, ctx.team, ctx.counts, ctx.dim)
            trace_cut(SCATTER_BACK, "gradient of the output", grad.device, parts, ctx.dim)
            return None, None, None, *parts


def scatter(tensor: torch.Tensor, team: Team, counts: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
    """Return ``counts[rank]`` rows along ``dim`` for each rank of the team, in fresh memory; differentiable."""
    dim = dim + tensor.ndim if dim < 0 else dim
    if not _has_graph((tensor,)):
        return dispatch.scatter(tensor, team, counts, dim)
    parts: tuple[torch.Tensor, ...] = _Scatter.apply(team, counts, dim, tensor)
    return parts


def gather(tensors: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    """Return the tensors joined along ``dim`` (not negative) on ``device``; differentiable."""
    return _gathered(tensors, Team.of([tensor.device for tensor in tensors]), device, dim)


def _gathered(tensors: Sequence[torch.Tensor], team: Team, device: torch.device, dim: int) -> torch.Tensor:
    if not _has_graph(tensors):
        return dispatch.gather(tensors, dim, device)
    whole: torch.Tensor = _Gather.apply(team, device, dim, *tensors)
    return whole


class _Broadcast(torch.autograd.Function):
    """A bucket of tensors to all ranks.  Outputs are flat, rank by rank: rank 0's are the tensors' own storage."""

    @staticmethod
    def forward(ctx: Any, team: Team, bucket: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that no rank used gets no gradient, not a zero one
        ctx.bucket, ctx.whole_step = bucket, current_step()
        ctx.team, ctx.source, ctx.streams = team, tensors[0].device, _streams_of(team)
        copies = dispatch.broadcast(tensors, team)
        # An alias of rank 0's, not the input: it shares the version counter, so an optimizer's step between forward
        # and backward is noticed as on one device, but it is no view that refuses to be written.
        for tensor, row in zip(tensors, copies, strict=True):
            if row[0] is tensor:
                row[0] = tensor.detach()
        return tuple([row[rank] for rank in team.ranks for row in copies])

    @staticmethod
    def backward(ctx: Any, *grads: _Grad) -> tuple[_Grad, ...]:
        with in_step(ctx.whole_step), span("reduce", ALL_RANKS, None, ctx.bucket), _resumed(ctx.team, ctx.streams):
            if torch.is_grad_enabled():  # a graph of the gradients is wanted
                return None, None, *_Reduce.apply(ctx.team, ctx.source, *grads)
            return None, None, *_sums(ctx.team, ctx.source, grads)


def _sums(team: Team, device: torch.device, grads: Sequence[_Grad]) -> list[_Grad]:
    """Return the sums over the ranks of gradients in the order of :class:`_Broadcast`'s outputs."""
    tensors = len(grads) // len(team.devices)
    rows = [grads[i::tensors] for i in range(tensors)]
    present = [i for i, row in enumerate(rows) if [each for each in row if each is not None]]
    totals: list[_Grad] = [None] * tensors
    for i, total in zip(present, dispatch.reduce_batch([rows[i] for i in present], "sum", device), strict=True):
        totals[i] = total
    return totals


class _Reduce(torch.autograd.Function):
    """The sums over the ranks of gradients in the order of :class:`_Broadcast`'s outputs; ``None`` adds nothing."""

    @staticmethod
    def forward(ctx: Any, team: Team, device: torch.device, *grads: _Grad) -> tuple[_Grad, ...]:
        ctx.set_materialize_grads(False)
        ctx.team, ctx.streams, ctx.whole_step = team, _streams_of(team), current_step()
        return tuple(_sums(team, device, grads))

    @staticmethod
    def backward(ctx: Any, *grads: _Grad) -> tuple[_Grad, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        flat: list[_Grad] = [None] * (len(grads) * len(ctx.team))
        if present:
            with in_step(ctx.whole_step), span("broadcast"), _resumed(ctx.team, ctx.streams):
                copies = _Broadcast.apply(ctx.team, NO_BUCKET, *(grads[i] for i in present))
            for position, copy in enumerate(copies):
                rank, i = divmod(position, len(present))
                flat[rank * len(grads) + present[i]] = copy
        # A rank that had nothing to add, gets nothing.
        return None, None, *(each if need else None for each, need in zip(flat, ctx.needs_input_grad[2:], strict=True))


def reduce_tensors(rows: Sequence[Sequence[torch.Tensor]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the sums over the ranks of ``rows[rank][i]``, on ``device``; differentiable."""
    team = Team.of([row[0].device if row else device for row in rows])
    totals: tuple[torch.Tensor, ...] = _Reduce.apply(team, device, *(tensor for row in rows for tensor in row))
    return totals


_FIRST = 2**62  # above every number that the engine gives out, below the one of gradient accumulation


def gradient_buckets(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return which tensors travel together, by position, from the last to the first, as backward makes gradients."""
    last = len(tensors) - 1
    return [[last - i for i in bucket] for bucket in bucket_positions(tensors[::-1])]


def broadcast_buckets(
    team: Team, tensors: Sequence[torch.Tensor], *, numbered: bool = True
) -> list[list[torch.Tensor]]:
    """Differentiable copies of many tensors: ``result[rank][i]``; their gradients are summed bucket by bucket.

    In a recording these are the buckets of the parameters, unless they are not ``numbered``.

    One autograd node per bucket of :func:`gradient_buckets`.
    The engine gives nodes that are made before the forward the lowest priority, so all of them would run last.  Their
    priority is raised: a bucket is reduced as soon as its gradients are there.
    """
    result: list[list[torch.Tensor]] = [[torch.Tensor()] * len(tensors) for _ in team.ranks]
    for position, positions in enumerate(gradient_buckets(tensors)):
        bucket = position if numbered else NO_BUCKET
        with span("broadcast", ALL_RANKS, None, bucket):
            copies: tuple[torch.Tensor, ...] = _Broadcast.apply(team, bucket, *(tensors[i] for i in positions))
        _raise_priority(copies, _FIRST - position)
        if is_tracing() and numbered:
            for rank in team.ranks:
                trace_ready(rank, position, copies[rank * len(positions) :][: len(positions)])
        for rank in team.ranks:
            for i, copy in zip(positions, copies[rank * len(positions) :], strict=False):
                result[rank][i] = copy
    return result


def _raise_priority(outputs: Sequence[torch.Tensor], number: int) -> None:
    node = outputs[0].grad_fn
    if node is not None and hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(number)
