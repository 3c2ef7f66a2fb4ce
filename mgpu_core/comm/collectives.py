"""Differentiable collectives: one tensor per rank in, one per rank out, all in fresh memory.

The gradient of a collective is its partner: of an all-gather a reduce-scatter, of an all-reduce an all-reduce.  Sums
are added in rank order, forward and backward, so every run gives the same bits.  Double backward works.  On
accelerators the copies and sums are put on each device's current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.comm import dispatch
from mgpu_core.comm.arguments import check_equal_sizes, check_joined, in_range, ordinary_list
from mgpu_core.devices.streams import caller_streams, resumed_on_all
from mgpu_core.trace.tracer import current_step, in_step, span

__all__ = ["all_gather", "all_reduce", "joint_columns", "joint_sum", "reduce_scatter"]


def all_reduce(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Add one tensor per rank and give the sum to every rank; the gradient is the sum of the ranks' gradients.

    Args:
        tensors: of one shape and dtype, as for :func:`mgpu_core.comm.all_reduce`.

    Raises:
        TypeError, ValueError: tensors that differ in shape or dtype, or cannot be added.
    """
    tensors = ordinary_list(tensors, "tensors")
    check_equal_sizes(tensors)
    return list(_AllReduce.apply(*tensors))


def all_gather(tensors: Sequence[torch.Tensor], dim: int = 0) -> list[torch.Tensor]:
    """Give every rank all tensors, joined along ``dim``; a rank's gradient is the sum over the ranks of its part.

    Args:
        tensors: of one dtype, and one shape but for ``dim``.

    Raises:
        IndexError, TypeError, ValueError: tensors that do not fit together, or a ``dim`` that is not there.
    """
    parts = ordinary_list(tensors, "tensors")
    dim = in_range(dim, parts[0].dim())
    check_joined(parts, dim, "tensors")
    return list(_AllGather.apply(dim, *parts))


def reduce_scatter(
    tensors: Sequence[torch.Tensor], dim: int = 0, counts: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Add one tensor per rank and give rank r chunk r of the sum along ``dim``; the gradient is an all-gather.

    Args:
        tensors: of one shape and dtype.
        counts: elements of each chunk along ``dim`` (default: sizes that differ by at most one, the first are larger).

    Raises:
        IndexError, TypeError, ValueError: tensors that differ, a ``dim`` that is not there, counts that do not add up.
    """
    tensors = ordinary_list(tensors, "tensors")
    check_equal_sizes(tensors)
    dim = in_range(dim, tensors[0].dim())
    length, ranks = tensors[0].shape[dim], len(tensors)
    if counts is None:
        counts = [length // ranks + (rank < length % ranks) for rank in range(ranks)]
    if len(counts) != ranks or sum(counts) != length or min(counts) < 0:
        raise ValueError(f"counts must be {ranks} sizes that add up to {length}, not {list(counts)}")
    return list(_ReduceScatter.apply(dim, list(counts), *tensors))


def joint_sum(token: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Return a token, and to every rank the sum of tensors of one shape and dtype; see :class:`_InTurn`."""
    if not torch.is_grad_enabled():
        return None, *_sums(tensors)
    outputs: Sequence[Any] = _InTurn.apply(None, token, *tensors)
    return outputs


def joint_columns(token: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Return a token, and to every rank all tensors, joined along the last dimension; see :class:`_InTurn`."""
    dim = tensors[0].ndim - 1
    if not torch.is_grad_enabled():
        return None, *_wholes(dim, tensors)
    outputs: Sequence[Any] = _InTurn.apply(dim, token, *tensors)
    return outputs


def _sums(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if tensors[0].is_cpu:  # a copy costs less there than the Python calls that save it
        sums = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        dispatch.all_reduce_into(sums, "sum", "direct", True)
        return sums
    sums = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    dispatch.all_reduce_into([tensor.contiguous() for tensor in tensors], "sum", "direct", True, outs=sums)
    return sums


def _wholes(dim: int, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [dispatch.gather(parts, dim, part.device) for part in parts]


def _remember(ctx: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Keep the ranks' devices and the caller's streams: backward runs on these streams too."""
    ctx.devices = [tensor.device for tensor in tensors]
    ctx.streams = caller_streams(ctx.devices)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _remember(ctx, tensors)
        return tuple(_sums(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with resumed_on_all(ctx.devices, ctx.streams):
            sums: tuple[torch.Tensor, ...] = _AllReduce.apply(*grads)
        return sums


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _remember(ctx, parts)
        ctx.dim, ctx.counts = dim, [part.shape[dim] for part in parts]
        return tuple(_wholes(dim, parts))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with resumed_on_all(ctx.devices, ctx.streams):
            return None, *_ReduceScatter.apply(ctx.dim, ctx.counts, *grads)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, counts: list[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _remember(ctx, tensors)
        ctx.dim = dim
        chunks = zip(*[tensor.split(counts, dim) for tensor in tensors], strict=True)
        return tuple(
            [dispatch.reduce_batch([row], "sum", device)[0] for row, device in zip(chunks, ctx.devices, strict=True)]
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with resumed_on_all(ctx.devices, ctx.streams):
            return None, None, *_AllGather.apply(ctx.dim, *grads)


class _InTurn(torch.autograd.Function):
    """An all-reduce, or along ``dim`` an all-gather, whose backward waits for those of the calls after it.

    Autograd has a thread per device, and adds the gradients of a tensor with several users as they come.  A token goes
    from each call to the next, and makes their backwards run one after the other, so that gradients come in one order
    in every run.  Where no rank needs a result, its inputs have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, dim: int | None, token: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        _remember(ctx, tensors)
        ctx.dim, ctx.whole_step = dim, current_step()
        if dim is None:
            return tensors[0].new_empty(0), *_sums(tensors)
        ctx.counts = [each.shape[dim] for each in tensors]
        return tensors[0].new_empty(0), *_wholes(dim, tensors)

    @staticmethod
    def backward(ctx: Any, token: object, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        like = next((each for each in grads if each is not None), None)
        if like is None:
            return None, None, *[None] * len(grads)
        with in_step(ctx.whole_step), span("meet"), resumed_on_all(ctx.devices, ctx.streams):
            whole = [
                torch.zeros_like(like, device=device) if grad is None else grad
                for grad, device in zip(grads, ctx.devices, strict=True)
            ]
            if ctx.dim is None:
                return None, None, *_AllReduce.apply(*whole)
            return None, None, *_ReduceScatter.apply(ctx.dim, ctx.counts, *whole)
