"""Optimizer steps over flat buffers: one kernel for all parameters of a bucket.

The parameters of many tensors lie end to end in one flat tensor, their gradients in another, and so does each kind of
state.  A table of segments says where each tensor lies; hyper-parameters, the clip coefficient, the loss scale and the
sign of an overflow are read from the device's memory, so that a step can be captured in a graph and its numbers
changed between replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from mgpu_core import _core
from mgpu_core.device.dtypes import FLOATING
from mgpu_core.device.memory import note_written
from mgpu_core.device.streams import core_stream
from mgpu_core.kernels import reference
from mgpu_core.kernels.arguments import as_tensor, check_floating, check_like, check_outs, on_one_device
from mgpu_core.record import span

__all__ = ["adam", "adam_groups", "adamw", "segment_table", "sgd", "sgd_groups"]

BEGIN, COUNT, GROUP, STEP, ACTIVE = range(5)  # the columns of a segment table


def segment_table(
    counts: Sequence[int],
    *,
    groups: Sequence[int] | None = None,
    begins: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The table of the tensors in a flat buffer: int64, ``(len(counts), 5)``: begin, count, group, step, active.

    Args:
        counts: elements of each tensor.
        groups: the row of the group table for each (default: 0).
        begins: where each begins (default: one right behind the other).
        device: where the flat buffers are (default: torch's default device).

    Steps are 0 and all segments active.  The kernels raise the step of every segment that they update; whoever sets
    ``table[i, 4]`` to 0 has tensor ``i`` left alone whole, as a parameter without gradient is.

    Raises:
        ValueError: segments that overlap or are not in the order of their begins.
    """
    starts = list(begins) if begins is not None else list(accumulate(counts, initial=0))[: len(counts)]
    rows = [[start, count, 0, 0, 1] for start, count in zip(starts, counts, strict=True)]
    for place, group in enumerate(groups or []):
        rows[place][GROUP] = group
    _check_rows(rows, end=None)
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), 5)


def sgd_groups(*groups: dict[str, float], device: torch.device | str | None = None) -> torch.Tensor:
    """The group table of :func:`sgd`: float64, ``(len(groups), 6)``.

    Args:
        groups: each with ``lr``, and what it wants of ``momentum``, ``dampening``, ``weight_decay``, ``nesterov`` and
            ``maximize`` (default 0), as in ``torch.optim.SGD``.
    """
    columns = {"lr": None, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}
    return _group_table(groups, columns, device)


def adam_groups(*groups: dict[str, float], device: torch.device | str | None = None) -> torch.Tensor:
    """The group table of :func:`adam` and :func:`adamw`: float64, ``(len(groups), 6)``.

    Args:
        groups: each with ``lr``, and what it wants of ``beta1`` (0.9), ``beta2`` (0.999), ``eps`` (1e-8),
            ``weight_decay`` (0) and ``maximize`` (0), as in ``torch.optim.Adam``.
    """
    columns = {"lr": None, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "maximize": 0.0}
    return _group_table(groups, columns, device)


def _group_table(
    groups: Sequence[dict[str, float]], columns: dict[str, float | None], device: torch.device | str | None
) -> torch.Tensor:
    for place, group in enumerate(groups):
        if unknown := set(group) - set(columns):
            raise ValueError(f"group {place} has {', '.join(sorted(unknown))}; known are {', '.join(columns)}")
        if "lr" not in group:
            raise ValueError(f"group {place} has no lr")
    rows = [[float(group.get(name, default or 0.0)) for name, default in columns.items()] for group in groups]
    return torch.tensor(rows, dtype=torch.float64, device=device).reshape(len(rows), len(columns))


def sgd(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    momentum: torch.Tensor | None,
    segments: torch.Tensor,
    groups: torch.Tensor,
    *,
    clip: torch.Tensor | None = None,
    loss_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One step of ``torch.optim.SGD``, in place.

    Args:
        parameters, gradients: flat, ``(count,)``, of one floating dtype and one device.
        momentum: the momentum buffers, like ``parameters``; ``None`` where no group has momentum.
        segments: of :func:`segment_table`; its steps are raised.
        groups: of :func:`sgd_groups`.
        clip: float32 scalar that the gradients are multiplied by.
        loss_scale: float32 scalar that the gradients are divided by.
        found_inf: float32 scalar; where it is not 0 nothing is changed, not even a step.

    Half precision is computed in float32.  On a GPU two launches on the current stream, a short
    one per segment and one over the buffers; nobody waits.

    Raises:
        TypeError, ValueError: a dtype, shape or device that is not named above; on the CPU also segments outside the
            buffers, groups that are not there, and momentum without a buffer.
    """
    flat = _Flat(parameters, gradients, segments, groups, clip, loss_scale, found_inf)
    states = [] if momentum is None else [flat.state(momentum, "momentum")]
    flat.check(states, ["momentum"])
    if flat.on_cpu and momentum is None and bool((groups[:, 1] != 0).any()):
        raise ValueError("a group has momentum, but there is no momentum buffer")
    with span("sgd"):
        if flat.stream is None:
            reference.sgd(parameters, gradients, momentum, segments, groups, clip, loss_scale, found_inf)
            return
        _core.sgd(flat.pointers(), 0 if momentum is None else momentum.data_ptr(), flat.stream)
    note_written([parameters, segments, *states])


def adam(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    segments: torch.Tensor,
    groups: torch.Tensor,
    *,
    max_exp_avg_sq: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
    loss_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One step of ``torch.optim.Adam`` (amsgrad with ``max_exp_avg_sq``), in place; see :func:`sgd`.

    Args:
        exp_avg, exp_avg_sq, max_exp_avg_sq: the state, like ``parameters``.
        groups: of :func:`adam_groups`.
    """
    flat = _Flat(parameters, gradients, segments, groups, clip, loss_scale, found_inf)
    _adam(flat, [exp_avg, exp_avg_sq, max_exp_avg_sq], decoupled=False)


def adamw(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    segments: torch.Tensor,
    groups: torch.Tensor,
    *,
    max_exp_avg_sq: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
    loss_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One step of ``torch.optim.AdamW``: :func:`adam` with the weight decay apart from the gradient."""
    flat = _Flat(parameters, gradients, segments, groups, clip, loss_scale, found_inf)
    _adam(flat, [exp_avg, exp_avg_sq, max_exp_avg_sq], decoupled=True)


def _adam(flat: _Flat, given: list[torch.Tensor | None], *, decoupled: bool) -> None:
    names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    states = [flat.state(state, name) for state, name in zip(given, names, strict=True) if state is not None]
    flat.check(states, names)
    average, square, largest = given
    assert average is not None
    assert square is not None
    with span("adam"):
        if flat.stream is None:
            reference.adam(
                flat.parameters, flat.gradients, average, square, largest, flat.segments, flat.groups, decoupled,
                flat.clip, flat.loss_scale, flat.found_inf,
            )  # fmt: skip
            return
        pointers = average.data_ptr(), square.data_ptr(), 0 if largest is None else largest.data_ptr()
        _core.adam(flat.pointers(), *pointers, decoupled, flat.stream)
    note_written([flat.parameters, flat.segments, *states])


class _Flat:
    """What both optimizers are given, checked."""

    def __init__(
        self,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        segments: torch.Tensor,
        groups: torch.Tensor,
        clip: torch.Tensor | None,
        loss_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        check_floating("an optimizer", parameters.dtype)
        self.parameters, self.gradients = as_tensor(parameters, "parameters"), as_tensor(gradients, "gradients")
        self.segments, self.groups = as_tensor(segments, "segments"), as_tensor(groups, "groups")
        self.clip, self.loss_scale, self.found_inf = clip, loss_scale, found_inf
        check_like(parameters, "parameters", (parameters.numel(),), parameters.dtype)
        check_like(gradients, "gradients", parameters.shape, parameters.dtype)
        check_like(segments, "segments", (segments.shape[0] if segments.dim() else 0, 5), torch.int64)
        check_like(groups, "groups", (groups.shape[0] if groups.dim() else 0, 6), torch.float64)
        scalars = {"clip": clip, "loss_scale": loss_scale, "found_inf": found_inf}
        for name, scalar in scalars.items():
            if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32):
                raise ValueError(f"{name} must be one float32 number, not {tuple(scalar.shape)} {scalar.dtype}")
        on_one_device(parameters=parameters, gradients=gradients, segments=segments, groups=groups, **scalars)
        self.stream = core_stream(parameters.device)
        self.on_cpu = parameters.device.type == "cpu"
        self._constants: torch.Tensor | None = None

    def state(self, state: torch.Tensor, name: str) -> torch.Tensor:
        """A state tensor that fits the parameters."""
        tensor = as_tensor(state, name)
        check_like(tensor, name, self.parameters.shape, self.parameters.dtype)
        on_one_device(parameters=self.parameters, **{name: tensor})
        return tensor

    def check(self, states: list[torch.Tensor], names: list[str]) -> None:
        """Raises unless all may be written and the tables fit; a GPU's tables are taken as they are."""
        check_outs([self.parameters, self.segments, *states], ["parameters", "segments", *names], [self.gradients])
        if self.on_cpu:
            _check_rows(self.segments.tolist(), end=self.parameters.numel(), groups=self.groups.shape[0])

    def pointers(self) -> tuple[int, int, int, str, int, int, int, int, int, int, int, int]:
        """What the core is given, with room for a GPU's first kernel to leave numbers for its second."""
        constants = 0
        if not self.on_cpu:
            shape = len(self.segments), _core.optimizer_constants()
            self._constants = torch.empty(shape, dtype=torch.float64, device=self.parameters.device)
            constants = self._constants.data_ptr()
        clip, scale, found = (0 if each is None else each.data_ptr() for each in self._scalars())
        parameters, gradients = self.parameters.data_ptr(), self.gradients.data_ptr()
        count, dtype = self.parameters.numel(), FLOATING[self.parameters.dtype]
        segments, groups = self.segments.data_ptr(), self.groups.data_ptr()
        tables = segments, len(self.segments), constants, groups, len(self.groups)
        return parameters, gradients, count, dtype, *tables, clip, scale, found

    def _scalars(self) -> tuple[torch.Tensor | None, ...]:
        return self.clip, self.loss_scale, self.found_inf


def _check_rows(rows: list[list[int]], *, end: int | None, groups: int | None = None) -> None:
    reach = 0
    for place, row in enumerate(rows):
        if row[BEGIN] < reach or row[COUNT] < 0:
            raise ValueError(f"segment {place} begins at {row[BEGIN]}, but the one before ends at {reach}")
        reach = row[BEGIN] + row[COUNT]
        if end is not None and reach > end:
            raise ValueError(f"segment {place} ends at {reach}, but the flat buffers have {end} elements")
        if groups is not None and not 0 <= row[GROUP] < groups:
            raise ValueError(f"segment {place} is of group {row[GROUP]}, but there are {groups} groups")
