"""Reference kernels in plain torch.  Tests compare with them; devices without a kernel of ours use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from functools import reduce as fold

import torch

from mgpu_core.kernels.flat_tables import ACTIVE, STEP

__all__ = ["adam", "average_of", "gather_rows", "l2_norm", "lion", "pack", "scale_cast", "sgd", "sum_ranks", "unpack"]

Tensors = list[torch.Tensor]

_HALF = (torch.float16, torch.bfloat16)


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float64 if one of the tensors has it, otherwise float32."""
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
    """Return the elements of all tensors, one after the other, scaled and cast."""
    return torch.cat([scale_cast(tensor, scale, dtype).reshape(-1) for tensor in tensors])


def unpack(flat: torch.Tensor, like: Sequence[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Return tensors of the shapes and dtype of ``like`` from a flat one."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [
        scale_cast(piece, scale, tensor.dtype).reshape(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)
    ]


def sum_ranks(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return the tensors combined one after the other; half precision in float32, rounded once.  avg truncates."""
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
    """Return the root of the sum of all squares, added up in float64; float32, or float64 of float64 tensors."""
    squares = torch.stack([tensor.to(torch.float64).square().sum() for tensor in tensors])
    return squares.sum().sqrt().to(_wide(tensors[0].dtype))


def _read(*tensors: torch.Tensor | None) -> list[list[float]]:
    """Return the numbers of each tensor as a list, an empty one for ``None``; the host waits for the device once."""
    sizes = [0 if tensor is None else tensor.numel() for tensor in tensors]
    given = [tensor.reshape(-1).to(torch.float64) for tensor in tensors if tensor is not None]
    return [numbers.tolist() for numbers in torch.cat(given).cpu().split(sizes)]


def _rows(numbers: list[float], length: int) -> list[list[float]]:
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]


def _slices(segments: list[list[float]]) -> dict[tuple[int, int], list[slice]]:
    """Return where the active elements of each group and step lie, in pieces that do not touch; steps are raised."""
    slices: dict[tuple[int, int], list[slice]] = {}
    for begin, count, group, step, active in (map(int, row) for row in segments):
        if active and count:
            pieces = slices.setdefault((group, step + 1), [])
            start = pieces.pop().start if pieces and pieces[-1].stop == begin else begin
            pieces.append(slice(start, begin + count))
    return slices


def _step(
    update: Callable[..., None],
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    states: list[torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    scalars: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Make one step of an optimizer, in place; raise the steps of the segments that take part.

    Args:
        update: called once per group and number of the step, as ``update(settings, parameters, gradients, *states)``:
            lists of flat tensors, and a row of the group table followed by the number of the step, from 1.  It changes
            parameters and states in place, and may change the gradients, which come clipped.  The lists
            are float32 where the dtype is half precision, and are rounded once, afterwards.
        tables: segments and groups.
        scalars: clip and found_inf.
    """
    segments, groups = tables
    rows, settings, clip, found_inf = _read(*tables, *scalars)
    if found_inf and found_inf[0] != 0:
        return
    factor = (clip or [1.0])[0]
    settings_of = _rows(settings, groups.shape[1])
    wide = _wide(parameters.dtype)
    flats = [(flat, flat.to(wide)) for flat in (parameters, *states)]
    wide_gradients = gradients.to(wide)
    for (group, step), slices in _slices(_rows(rows, segments.shape[1])).items():
        lists = [[flat[position] for position in slices] for _, flat in flats]
        scaled = torch._foreach_mul([wide_gradients[position] for position in slices], factor)
        update([*settings_of[group], step], lists[0], scaled, *lists[1:])
        for (flat, _), updated in zip(flats, lists, strict=True):
            if flat.dtype != wide:
                torch._foreach_copy_([flat[position] for position in slices], updated)
    segments[:, STEP] += (segments[:, ACTIVE] != 0).long()


def _add_scaled(tensors: Tensors, factor: float, others: Tensors | tuple[torch.Tensor, ...]) -> None:
    """Do ``tensors += factor * others``, with the product rounded: some devices round once where it is ``alpha=``.

    The devices of a team must come to the same bits.
    """
    torch._foreach_add_(tensors, torch._foreach_mul(others, factor))


def sgd(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    momentum: torch.Tensor | None,
    segments: torch.Tensor,
    groups: torch.Tensor,
    clip: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """Make one step of ``torch.optim.SGD`` on flat parameters, in place.

    Raises:
        ValueError: a group has momentum, but there is no momentum buffer.
    """
    states = [] if momentum is None else [momentum]
    _step(_sgd, parameters, gradients, states, (segments, groups), (clip, found_inf))


def _sgd(settings: list[float], parameters: Tensors, gradients: Tensors, momentum: Tensors | None = None) -> None:
    lr, keep, dampening, decay, nesterov, maximize, step = settings
    if maximize:
        torch._foreach_neg_(gradients)
    _add_scaled(gradients, decay, parameters)
    if keep and momentum is None:
        raise ValueError("a group has momentum, but there is no momentum buffer")
    if keep and momentum is not None:
        if step == 1:
            torch._foreach_copy_(momentum, gradients)
        else:
            torch._foreach_mul_(momentum, keep)
            _add_scaled(momentum, 1 - dampening, gradients)
        if nesterov:
            _add_scaled(gradients, keep, momentum)
        else:
            gradients = momentum
    _add_scaled(parameters, -lr, gradients)


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
    found_inf: torch.Tensor | None,
) -> None:
    """Make one step of ``torch.optim.Adam`` (``AdamW`` where the decay is decoupled) on flat parameters, in place."""
    states = [exp_avg, exp_avg_sq] if max_exp_avg_sq is None else [exp_avg, exp_avg_sq, max_exp_avg_sq]
    update = partial(_adam, decoupled)
    _step(update, parameters, gradients, states, (segments, groups), (clip, found_inf))


def _adam(
    decoupled: bool,
    settings: list[float],
    parameters: Tensors,
    gradients: Tensors,
    averages: Tensors,
    squares: Tensors,
    most: Tensors | None = None,
) -> None:
    lr, beta1, beta2, eps, decay, maximize, step = settings
    if maximize:
        torch._foreach_neg_(gradients)
    if decoupled:
        torch._foreach_mul_(parameters, 1 - lr * decay)
    else:
        _add_scaled(gradients, decay, parameters)
    _add_scaled(averages, 1 - beta1, torch._foreach_sub(gradients, averages))
    fresh = torch._foreach_mul(gradients, 1 - beta2)
    torch._foreach_mul_(fresh, gradients)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_add_(squares, fresh)
    if most is not None:
        torch._foreach_maximum_(most, squares)
    roots = torch._foreach_sqrt(squares if most is None else most)
    torch._foreach_div_(roots, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(roots, eps)
    _add_scaled(parameters, -lr / (1 - beta1**step), torch._foreach_div(averages, roots))


def lion(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    segments: torch.Tensor,
    groups: torch.Tensor,
    clip: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """Make one step of Lion on flat parameters, in place."""
    _step(_lion, parameters, gradients, [exp_avg], (segments, groups), (clip, found_inf))


def _lion(settings: list[float], parameters: Tensors, gradients: Tensors, averages: Tensors) -> None:
    lr, beta1, beta2, decay, maximize, _, _ = settings
    if maximize:
        torch._foreach_neg_(gradients)
    moves = torch._foreach_sub(gradients, averages)
    torch._foreach_mul_(moves, 1 - beta1)
    torch._foreach_add_(moves, averages)
    torch._foreach_sign_(moves)
    torch._foreach_mul_(parameters, 1 - lr * decay)
    _add_scaled(parameters, -lr, moves)
    torch._foreach_mul_(averages, beta2)
    _add_scaled(averages, 1 - beta2, gradients)
