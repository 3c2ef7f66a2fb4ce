"""Batch normalisation with the statistics of all ranks' rows, inside one process.

The ranks meet in the forward, and the last one to arrive applies one autograd node to all ranks' inputs at once.  So
the gradient is exact, and no thread waits for another in a backward, where on the CPU, and for ranks that share a GPU,
there is one thread for all of them.

The formulas are those of S. Ioffe and C. Szegedy, "Batch Normalization", 2015 (arXiv:1502.03167), section 3, with sums
over all ranks; variances are of centred values (two passes), as a sum of squares would lose digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from mgpu_core.comm.generic import ALGORITHM
from mgpu_core.comm.watch import hop, watched
from mgpu_core.device.compiled import outside_the_compiler
from mgpu_core.device.meeting import Meeting, current_seat
from mgpu_core.device.streams import on_all
from mgpu_core.module_tree import modules_of
from mgpu_core.record import current_step, in_step, span

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

M = TypeVar("M", bound=Module)
Tensors = Sequence[torch.Tensor]

_numbers = count()


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm1d``, ``2d`` and ``3d`` whose batch is all ranks' rows of this forward.

    In :class:`mgpu_core.DataParallel`, :func:`mgpu_core.parallel_apply` and :class:`mgpu_core.TrainStep`.  With one
    rank, in ``eval()`` and outside of these it is the plain layer.  Every rank's running statistics are the team's.
    Made by :func:`convert_sync_batchnorm`.  Its gradient cannot be differentiated again.

    Raises:
        ValueError: another number of channels than the layer has.
        RuntimeError: run again in a backward (inside a checkpoint), where the ranks cannot meet.
        Error: a rank ended, or did not come in time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        self.number = next(_numbers)  # the same in all ranks' copies: by it they find each other
        # In the last forward, which may run again; in a list, because a replica's own attributes would be lost.
        self._met = [False]

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  # torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")
        own = {"weight": self.weight, "bias": self.bias, "running_mean": self.running_mean}
        for name, each in own.items():
            if each is not None and each.numel() != input.shape[1]:
                raise ValueError(
                    f"expected {each.numel()} channels in dimension 1, one per number of {name}, got {input.shape[1]} "
                    f"in an input of shape {tuple(input.shape)}"
                )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Normalises ``(rows, channels, ...)`` by the mean and variance of all ranks' rows."""
        seat = current_seat()
        uses_batch = self.training or self.running_mean is None
        if self._met[0] and uses_batch and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "SyncBatchNorm ran again in a backward, inside a checkpoint: its ranks meet in the forward alone. "
                "Leave the layer out of the checkpoint"
            )
        self._met[0] = seat is not None and uses_batch and _is_checkpointed()
        if seat is None or not uses_batch:
            return super().forward(input)
        self._check_input_dim(input)
        value = input, self.weight, self.bias
        output, mean, variance, rows = seat.together(
            ("batch norm", self.number), value, lambda values: _all_ranks(seat.meeting, self.eps, values)
        )
        self._follow(mean, variance, rows)
        result: torch.Tensor = output
        return result

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, rows: int) -> None:
        """Moves this rank's running statistics; their variance is unbiased, as in torch."""
        if not self.training or not self.track_running_stats:
            return
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the plain average of all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = variance * (rows / max(1, rows - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


@outside_the_compiler
def _is_checkpointed() -> bool:
    """Whether this forward looks like one inside a checkpoint: without gradients, or with hooks on what it saves."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _all_ranks(meeting: Meeting, eps: float, values: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor, Any, int]]:
    """Each rank's output, and on its device the mean, the variance and the number of values per channel."""
    inputs, weights, biases = ([value[i] for value in values] for i in range(3))
    rows = sum(each.numel() // each.shape[1] for each in inputs)
    if rows <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {rows} over all ranks")
    with span("sync_batchnorm"), on_all(meeting.devices, meeting.streams):
        places = meeting.devices, meeting.streams
        outputs = _Joint.apply(places, eps, len(inputs), *inputs, *weights, *biases)
    ranks = len(inputs)
    means, variances = outputs[ranks : 2 * ranks], outputs[2 * ranks : 3 * ranks]
    return [(outputs[rank], means[rank], variances[rank], rows) for rank in range(ranks)]


class _Joint(torch.autograd.Function):
    """All ranks' inputs, weights and biases in; all ranks' outputs, and the statistics on each rank's device, out."""

    @staticmethod
    def forward(ctx: Any, places: Any, eps: float, ranks: int, *tensors: Any) -> tuple[torch.Tensor, ...]:
        inputs, weights, biases = tensors[:ranks], tensors[ranks : 2 * ranks], tensors[2 * ranks :]
        rows = sum(each.numel() // each.shape[1] for each in inputs)
        means = _sums(inputs, [_wide(each).sum(_all_but_1(each)) for each in inputs], rows)
        centred = [_wide(each) - _along(mean, each) for each, mean in zip(inputs, means, strict=True)]
        variances = _sums(inputs, [each.square().sum(_all_but_1(each)) for each in centred], rows)
        scales = [(variance + eps).rsqrt() for variance in variances]
        outputs = [
            _affine(each * _along(scale, each), weight, bias).to(given.dtype)
            for each, scale, weight, bias, given in zip(centred, scales, weights, biases, inputs, strict=True)
        ]
        ctx.places, ctx.ranks, ctx.rows, ctx.whole_step = places, ranks, rows, current_step()
        ctx.save_for_backward(*inputs, *weights, *means, *scales)
        ctx.affine_dtypes = [None if each is None else each.dtype for each in (*weights, *biases)]
        ctx.mark_non_differentiable(*means, *variances)
        return *outputs, *means, *variances

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ranks = ctx.ranks
        inputs, weights, means, scales = (ctx.saved_tensors[i * ranks : (i + 1) * ranks] for i in range(4))
        with in_step(ctx.whole_step), span("sync_batchnorm"), on_all(*ctx.places):
            normal = [
                (_wide(each) - _along(mean, each)) * _along(scale, each)
                for each, mean, scale in zip(inputs, means, scales, strict=True)
            ]
            gradients = [_wide(each) for each in grads[:ranks]]
            to_weights = [(each * x).sum(_all_but_1(x)) for each, x in zip(gradients, normal, strict=True)]
            to_biases = [each.sum(_all_but_1(each)) for each in gradients]
            by_weight = [_scaled(each, weight) for each, weight in zip(gradients, weights, strict=True)]
            slopes = [(g * x).sum(_all_but_1(x)) for g, x in zip(by_weight, normal, strict=True)]
            along = _sums(inputs, slopes, ctx.rows)
            level = _sums(inputs, [g.sum(_all_but_1(g)) for g in by_weight], ctx.rows)
            to_inputs = [
                ((g - _along(flat, g) - x * _along(slope, g)) * _along(scale, g)).to(given.dtype)
                for g, x, flat, slope, scale, given in zip(by_weight, normal, level, along, scales, inputs, strict=True)
            ]
            to_affine = [
                None if dtype is None else each.to(dtype)
                for each, dtype in zip((*to_weights, *to_biases), ctx.affine_dtypes, strict=True)
            ]
        return None, None, None, *to_inputs, *to_affine


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision is added up in float32."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def _all_but_1(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _along(channels: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """One number per channel, to be combined with a tensor that has them in dimension 1."""
    return channels.view(1, -1, *[1] * (tensor.dim() - 2))


def _scaled(tensor: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return tensor if weight is None else tensor * _along(weight, tensor)


def _affine(tensor: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    scaled = _scaled(tensor, weight)
    return scaled if bias is None else scaled + _along(bias, tensor)


def _sums(inputs: Tensors, parts: Tensors, rows: int) -> list[torch.Tensor]:
    """The ranks' sums added up in rank order, over ``rows``; a copy on each rank's device."""
    totals: list[torch.Tensor] = []
    with watched("all_reduce", [parts], others=[totals]) as watch:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part.to(total.device)
        total /= rows
        hop(True, parts, [total])
        for each in inputs:
            totals.append(total.to(each.device))
            if totals[-1] is not total:
                hop(False, [total], totals[-1:])
        watch.ran(ALGORITHM, [total])
    return totals


def convert_sync_batchnorm(module: M) -> M:
    """Replaces every BatchNorm1d, 2d and 3d, and torch's SyncBatchNorm, by :class:`SyncBatchNorm`.

    Args:
        module: changed in place; a single layer is returned anew.  Parameters and buffers stay the same objects, so an
            optimizer that was made before still fits.

    Returns:
        The module, or the layer in its place.

    Raises:
        TypeError: a layer whose class has a forward of its own, or parametrizations; before anything is changed.
        ValueError: a lazy layer that has not seen an input yet; before anything is changed.
    """
    for each in modules_of(module):
        if _is_convertible(each):
            _refuse_special(each)
    converted: M = _convert(module, {})
    return converted


def _is_convertible(module: Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def _refuse_special(layer: Module) -> None:
    name = type(layer).__name__
    if is_parametrized(layer):
        raise TypeError(f"{name} has parametrizations, which its place in the team could not follow: remove them first")
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(f"{name} does not know its channels yet: run a forward before it is converted")
    if type(layer).forward not in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward) or "forward" in vars(layer):
        raise TypeError(f"{name} has a forward of its own, which would be lost: put a plain BatchNorm layer into it")


def _convert(module: Any, known: dict[int, Module]) -> Any:
    """``known``: what each module met so far has become; one that has two names, or parents, stays one."""
    if id(module) in known:
        return known[id(module)]
    if _is_convertible(module):
        known[id(module)] = _converted(module)
        return known[id(module)]
    known[id(module)] = module
    for name, child in list(module._modules.items()):
        if child is not None and (converted := _convert(child, known)) is not child:
            setattr(module, name, converted)
    return module


def _converted(layer: _BatchNorm) -> SyncBatchNorm:
    """All that the layer has, the very same: parameters, buffers, hooks, attributes of the user's own."""
    made = SyncBatchNorm.__new__(SyncBatchNorm)
    made.__dict__.update(layer.__dict__, _compiled_call_impl=None)
    made._begin()
    return made
