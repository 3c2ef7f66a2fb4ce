"""What each kernel computes, in plain torch.  Tests compare with it; devices without a kernel of ours use it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold

import torch

__all__ = ["adam", "average_of", "gather_rows", "l2_norm", "lion", "pack", "scale_cast", "sgd", "sum_ranks", "unpack"]

_HALF = (torch.float16, torch.bfloat16)


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    """In which floating numbers are computed: float64 where one takes part, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def gather_rows(
    rows: torch.Tensor, index: torch.Tensor, *, scale: float, shift: float, dtype: torch.dtype
) -> torch.Tensor:
    """``rows[index] * scale + shift``, computed in float32 and rounded once to ``dtype``."""
    return (rows[index].to(torch.float32) * scale + shift).to(dtype)


def scale_cast(tensor: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``tensor * scale``, rounded once to ``dtype``; a tensor of that dtype as it is where the scale is 1."""
    if scale == 1 and tensor.dtype == dtype:
        return tensor.clone()
    return (tensor.to(_wide(tensor.dtype, dtype)) * scale).to(dtype)


def pack(tensors: Sequence[torch.Tensor], scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The elements of all tensors, one behind the other, scaled and cast."""
    return torch.cat([scale_cast(tensor, scale, dtype).reshape(-1) for tensor in tensors])


def unpack(flat: torch.Tensor, like: Sequence[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Tensors of the shapes and dtype of ``like`` from a flat one."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [
        scale_cast(piece, scale, tensor.dtype).reshape(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)
    ]


def sum_ranks(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The tensors combined one after the other; half precision in float32, rounded once.  avg cuts toward zero."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in _HALF else dtype
    combine = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    total = fold(combine, [tensor.to(wide) for tensor in tensors])
    return (average_of(total, len(tensors)) if op == "avg" else total).to(dtype).clone()


def average_of(total: torch.Tensor, count: int) -> torch.Tensor:
    """``total / count``, of integers cut toward zero."""
    if total.is_complex():
        return torch.view_as_complex(average_of(torch.view_as_real(total), count))
    if total.is_floating_point():
        # By a tensor: where the divisor is a number, torch on a GPU multiplies by its inverse, which may lose a bit.
        return total / torch.full((), count, dtype=total.dtype, device=total.device)
    # In int64: of a narrow dtype torch takes the divisor, too, as one of its numbers, which wrap.
    return torch.div(total.to(torch.int64), count, rounding_mode="trunc")


def l2_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The root of the sum of all squares, added up in float64; float32, or float64 of float64 tensors."""
    squares = torch.stack([tensor.to(torch.float64).square().sum() for tensor in tensors])
    return squares.sum().sqrt().to(_wide(tensors[0].dtype))


def _factor(maximize: bool, clip: torch.Tensor | None, loss_scale: torch.Tensor | None) -> float:
    factor = -1.0 if maximize else 1.0
    factor *= 1.0 if clip is None else clip.item()
    return factor / (1.0 if loss_scale is None else loss_scale.item())


def _active(segments: torch.Tensor, found_inf: torch.Tensor | None) -> list[list[int]]:
    """The segments that take part, their steps raised; none after an overflow."""
    if found_inf is not None and found_inf.item() != 0:
        return []
    segments[:, 3] += (segments[:, 4] != 0).long()
    return [row for row in segments.tolist() if row[4]]


def sgd(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    momentum: torch.Tensor | None,
    segments: torch.Tensor,
    groups: torch.Tensor,
    clip: torch.Tensor | None,
    loss_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """One step of ``torch.optim.SGD`` on flat parameters, in place."""
    wide = _wide(parameters.dtype)
    for begin, count, group, step, _ in _active(segments, found_inf):
        lr, keep, dampening, decay, nesterov, maximize = groups[group].tolist()
        place = slice(begin, begin + count)
        parameter = parameters[place].to(wide)
        gradient = gradients[place].to(wide) * _factor(bool(maximize), clip, loss_scale) + decay * parameter
        if keep:
            assert momentum is not None
            buffer = gradient if step == 1 else keep * momentum[place].to(wide) + (1 - dampening) * gradient
            momentum[place] = buffer.to(parameters.dtype)
            gradient = gradient + keep * buffer if nesterov else buffer
        parameters[place] = (parameter - lr * gradient).to(parameters.dtype)


def adam(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    max_exp_avg_sq: torch.Tensor | None,
    segments: torch.Tensor,
    groups: torch.Tensor,
    decoupled: bool,
    clip: torch.Tensor | None,
    loss_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """One step of ``torch.optim.Adam`` (``AdamW`` where the decay is decoupled) on flat parameters, in place."""
    wide, dtype = _wide(parameters.dtype), parameters.dtype
    for begin, count, group, step, _ in _active(segments, found_inf):
        lr, beta1, beta2, eps, decay, maximize = groups[group].tolist()
        place = slice(begin, begin + count)
        parameter = parameters[place].to(wide)
        if decoupled:
            parameter, decay = parameter * (1 - lr * decay), 0
        gradient = gradients[place].to(wide) * _factor(bool(maximize), clip, loss_scale) + decay * parameter
        average = exp_avg[place].to(wide)
        average = average + (1 - beta1) * (gradient - average)
        square = exp_avg_sq[place].to(wide) * beta2 + (1 - beta2) * gradient * gradient
        exp_avg[place], exp_avg_sq[place] = average.to(dtype), square.to(dtype)
        if max_exp_avg_sq is not None:
            square = torch.maximum(max_exp_avg_sq[place].to(wide), square)
            max_exp_avg_sq[place] = square.to(dtype)
        root = square.sqrt() / (1 - beta2**step) ** 0.5 + eps
        parameters[place] = (parameter - lr / (1 - beta1**step) * (average / root)).to(dtype)


def lion(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    segments: torch.Tensor,
    groups: torch.Tensor,
    clip: torch.Tensor | None,
    loss_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """Make one step of Lion on flat parameters, in place."""
    wide, dtype = _wide(parameters.dtype), parameters.dtype
    for begin, count, group, _, _ in _active(segments, found_inf):
        lr, beta1, beta2, decay, maximize, _ = groups[group].tolist()
        place = slice(begin, begin + count)
        gradient = gradients[place].to(wide) * _factor(bool(maximize), clip, loss_scale)
        average = exp_avg[place].to(wide)
        move = lr * (average + (1 - beta1) * (gradient - average)).sign()
        parameters[place] = (parameters[place].to(wide) * (1 - lr * decay) - move).to(dtype)
        exp_avg[place] = (average * beta2 + (1 - beta2) * gradient).to(dtype)
