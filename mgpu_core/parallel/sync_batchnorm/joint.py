"""All ranks' batch in one autograd node.

The last rank to arrive applies it to all ranks' inputs at once.  So the gradient is exact, and no thread waits for
another in a backward, where on the CPU, and for ranks that share a GPU, there is one thread for all of them.

The formulas are those of S. Ioffe and C. Szegedy, "Batch Normalization", 2015 (arXiv:1502.03167), section 3, with sums
over all ranks; variances are of centred values (two passes), as a sum of squares would lose digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.comm.collectives import all_reduce
from mgpu_core.devices.streams import on_all, resumed_on_all
from mgpu_core.ranks.run import Run
from mgpu_core.trace.tracer import current_step, in_step, span

__all__ = ["of_all_ranks"]

Tensors = Sequence[torch.Tensor]


def of_all_ranks(
    run: Run, eps: float, values: Sequence[Sequence[Any]]
) -> list[tuple[torch.Tensor, torch.Tensor, Any, int]]:
    """Return each rank's output, and on its device the mean, the variance and the number of values per channel.

    Args:
        values: per rank its input, weight, bias, and whether it is in grad mode.  One that is not has an output without
            a graph, whichever rank comes last.
    """
    inputs, weights, biases, grad_modes = ([value[i] for value in values] for i in range(4))
    rows = sum(each.numel() // each.shape[1] for each in inputs)
    if rows <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {rows} over all ranks")
    with (
        span("sync_batchnorm"),
        on_all(run.team.devices, run.streams),
        torch.set_grad_enabled(any(grad_modes)),
    ):
        devices_and_streams = run.team.devices, run.streams
        outputs = _JointStatistics.apply(devices_and_streams, eps, len(inputs), *inputs, *weights, *biases)
    ranks = len(inputs)
    results = [output if graph else output.detach() for output, graph in zip(outputs[:ranks], grad_modes, strict=True)]
    means, variances = outputs[ranks : 2 * ranks], outputs[2 * ranks :]
    return [(results[rank], means[rank], variances[rank], rows) for rank in range(ranks)]


class _JointStatistics(torch.autograd.Function):
    """All ranks' inputs, weights and biases in; all ranks' outputs, and the statistics on each rank's device, out."""

    @staticmethod
    def forward(ctx: Any, devices_and_streams: Any, eps: float, ranks: int, *tensors: Any) -> tuple[torch.Tensor, ...]:
        inputs, weights, biases = tensors[:ranks], tensors[ranks : 2 * ranks], tensors[2 * ranks :]
        rows = sum(each.numel() // each.shape[1] for each in inputs)
        means, centred, variances = _statistics(inputs, rows)
        scales = [(variance + eps).rsqrt() for variance in variances]
        outputs = [
            _affine(values * _along(scale, values), weight, bias).to(given.dtype)
            for values, scale, weight, bias, given in zip(centred, scales, weights, biases, inputs, strict=True)
        ]
        ctx.devices_and_streams, ctx.eps, ctx.ranks, ctx.rows, ctx.whole_step = (
            devices_and_streams,
            eps,
            ranks,
            rows,
            current_step(),
        )
        ctx.save_for_backward(*inputs, *weights, *means, *scales)
        ctx.affine_dtypes = [None if each is None else each.dtype for each in (*weights, *biases)]
        ctx.mark_non_differentiable(*means, *variances)
        return *outputs, *means, *variances

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ranks = ctx.ranks
        inputs, weights, means, scales = (ctx.saved_tensors[i * ranks : (i + 1) * ranks] for i in range(4))
        with in_step(ctx.whole_step), span("sync_batchnorm"), resumed_on_all(*ctx.devices_and_streams):
            if torch.is_grad_enabled():  # it will be differentiated again: by the inputs, in their statistics too
                means, _, variances = _statistics(inputs, ctx.rows)
                scales = [(variance + ctx.eps).rsqrt() for variance in variances]
            normal = [
                (_wide(given) - _along(mean, given)) * _along(scale, given)
                for given, mean, scale in zip(inputs, means, scales, strict=True)
            ]
            gradients = [_wide(each) for each in grads[:ranks]]
            to_weights = [(each * x).sum(_all_but_1(x)) for each, x in zip(gradients, normal, strict=True)]
            to_biases = [each.sum(_all_but_1(each)) for each in gradients]
            by_weight = [_scaled(each, weight) for each, weight in zip(gradients, weights, strict=True)]
            slopes = [(g * x).sum(_all_but_1(x)) for g, x in zip(by_weight, normal, strict=True)]
            along = _means(slopes, ctx.rows)
            level = _means([g.sum(_all_but_1(g)) for g in by_weight], ctx.rows)
            to_inputs = [
                ((g - _along(flat, g) - x * _along(slope, g)) * _along(scale, g)).to(given.dtype)
                for g, x, flat, slope, scale, given in zip(by_weight, normal, level, along, scales, inputs, strict=True)
            ]
            to_affine = [
                None if dtype is None else grad.to(dtype)
                for grad, dtype in zip((*to_weights, *to_biases), ctx.affine_dtypes, strict=True)
            ]
        return None, None, None, *to_inputs, *to_affine


def _statistics(inputs: Tensors, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Means, centred inputs and variances, each where its rank is."""
    means = _means([_wide(each).sum(_all_but_1(each)) for each in inputs], rows)
    centred = [_wide(each) - _along(mean, each) for each, mean in zip(inputs, means, strict=True)]
    return means, centred, _means([each.square().sum(_all_but_1(each)) for each in centred], rows)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision is added up in float32."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def _all_but_1(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _along(channels: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return one number per channel, in the shape that combines with a tensor whose dimension 1 they are."""
    return channels.view(1, -1, *[1] * (tensor.dim() - 2))


def _scaled(tensor: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return tensor if weight is None else tensor * _along(weight, tensor)


def _affine(tensor: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    scaled = _scaled(tensor, weight)
    return scaled if bias is None else scaled + _along(bias, tensor)


def _means(sums: Tensors, rows: int) -> list[torch.Tensor]:
    """Return the ranks' sums added up in rank order, over ``rows``, on each rank's device."""
    return [each / rows for each in all_reduce(sums)]
