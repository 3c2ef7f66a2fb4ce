"""Optimizer steps over flat buffers: one kernel for all parameters of a bucket.

The parameters of many tensors lie end to end in one flat tensor, their gradients in another, and so does each kind of
state.  A table of segments says where each tensor lies; hyper-parameters, the clip coefficient, the loss scale and the
sign of an overflow are read from the device's memory, so that a step can be captured in a graph and its numbers
changed between replays.

Who steps over the same buffers again and again makes a :class:`FlatSgd` or :class:`FlatAdam` once, which looks at them
once; the functions are one such step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mgpu_core import _core
from mgpu_core.device.dtypes import FLOATING
from mgpu_core.device.memory import note_written
from mgpu_core.device.streams import core_stream
from mgpu_core.kernels import reference
from mgpu_core.kernels.arguments import as_out, as_tensor, check_floating, check_like, check_outs, on_one_device
from mgpu_core.kernels.flat_tables import check_rows
from mgpu_core.record import span

__all__ = ["FlatAdam", "FlatSgd", "adam", "adamw", "sgd"]

Pointers = tuple[int, int, int, str, int, int, int, int, int, int, int, int]


class _Flat:
    """What both optimizers are given, checked once.

    Args:
        states: by name, a tensor like ``parameters``; ``None`` where there is none of that kind.
        clip, loss_scale, found_inf: as for :func:`sgd`.
    """

    def __init__(
        self,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        segments: torch.Tensor,
        groups: torch.Tensor,
        states: Mapping[str, torch.Tensor | None],
        *,
        clip: torch.Tensor | None = None,
        loss_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        parameters, gradients = as_out(parameters, "parameters"), as_tensor(gradients, "gradients")
        segments, groups = as_out(segments, "segments"), as_tensor(groups, "groups")
        scalars = _as_scalars(clip=clip, loss_scale=loss_scale, found_inf=found_inf)
        self.parameters, self.gradients, self.segments, self.groups = parameters, gradients, segments, groups
        self.clip, self.loss_scale, self.found_inf = scalars.values()
        check_floating("an optimizer", parameters.dtype)
        check_like(parameters, "parameters", (parameters.numel(),), parameters.dtype)
        check_like(gradients, "gradients", parameters.shape, parameters.dtype)
        check_like(segments, "segments", (segments.shape[0] if segments.dim() else 0, 5), torch.int64)
        check_like(groups, "groups", (groups.shape[0] if groups.dim() else 0, 6), torch.float64)
        on_one_device(parameters=parameters, gradients=gradients, segments=segments, groups=groups, **scalars)
        self.on_cpu = parameters.device.type == "cpu"
        self.states = self._checked(states)
        self.written = [parameters, segments, *self.states.values()]
        self._pointers = self._collect()

    def _checked(self, states: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """The states that there are.  Raises unless all may be written and the tables fit; a GPU's are taken as is."""
        there = {name: state for name, state in states.items() if state is not None or name not in _OPTIONAL}
        given = {name: as_out(state, name) for name, state in there.items()}
        for name, state in given.items():
            check_like(state, name, self.parameters.shape, self.parameters.dtype)
            on_one_device(parameters=self.parameters, **{name: state})
        outs = {"parameters": self.parameters, "segments": self.segments, **given}
        check_outs(list(outs.values()), list(outs), [self.gradients])
        if self.on_cpu:
            check_rows(self.segments.tolist(), end=self.parameters.numel(), groups=self.groups.shape[0])
        return given

    def _collect(self) -> Pointers:
        """What the core is given, with room for a GPU's first kernel to leave numbers for its second."""
        constants = 0
        if not self.on_cpu:
            shape = len(self.segments), _core.optimizer_constants()
            self._constants = torch.empty(shape, dtype=torch.float64, device=self.parameters.device)
            constants = self._constants.data_ptr()
        clip, scale, found = (_pointer(each) for each in (self.clip, self.loss_scale, self.found_inf))
        parameters, gradients = self.parameters.data_ptr(), self.gradients.data_ptr()
        count, dtype = self.parameters.numel(), FLOATING[self.parameters.dtype]
        segments, groups = self.segments.data_ptr(), self.groups.data_ptr()
        tables = segments, len(self.segments), constants, groups, len(self.groups)
        return parameters, gradients, count, dtype, *tables, clip, scale, found


_OPTIONAL = {"momentum", "max_exp_avg_sq"}


def _as_scalars(**given: Any) -> dict[str, torch.Tensor | None]:
    """What is not ``None`` as a tensor; raises ValueError unless it is one float32 number."""
    scalars = {name: None if each is None else as_tensor(each, name) for name, each in given.items()}
    for name, scalar in scalars.items():
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32):
            raise ValueError(f"{name} must be one float32 number, not {tuple(scalar.shape)} {scalar.dtype}")
    return scalars


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class FlatSgd(_Flat):
    """Steps of ``torch.optim.SGD`` over the same buffers, in place; arguments as of :func:`sgd`."""

    def __init__(
        self,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        momentum: torch.Tensor | None,
        segments: torch.Tensor,
        groups: torch.Tensor,
        **scalars: torch.Tensor | None,
    ) -> None:
        super().__init__(parameters, gradients, segments, groups, {"momentum": momentum}, **scalars)
        self._momentum = self.states.get("momentum")

    def step(self) -> None:
        """One step, on the current stream.

        Raises:
            ValueError: on the CPU, a group has momentum, but there is no buffer; a segment that was written to the
                table since is outside the buffers.
        """
        stream = core_stream(self.parameters.device)
        with span("sgd"):
            if stream is None:
                reference.sgd(
                    self.parameters, self.gradients, self._momentum, self.segments, self.groups,
                    self.clip, self.loss_scale, self.found_inf,
                )  # fmt: skip
                return
            _core.sgd(self._pointers, _pointer(self._momentum), stream)
        note_written(self.written)


class FlatAdam(_Flat):
    """Steps of ``torch.optim.Adam`` or, decoupled, ``AdamW`` over the same buffers, in place; see :func:`adam`."""

    def __init__(
        self,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        segments: torch.Tensor,
        groups: torch.Tensor,
        *,
        decoupled: bool,
        max_exp_avg_sq: torch.Tensor | None = None,
        **scalars: torch.Tensor | None,
    ) -> None:
        states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "max_exp_avg_sq": max_exp_avg_sq}
        super().__init__(parameters, gradients, segments, groups, states, **scalars)
        self._average, self._square = self.states["exp_avg"], self.states["exp_avg_sq"]
        self._largest, self._decoupled = self.states.get("max_exp_avg_sq"), decoupled

    def step(self) -> None:
        """One step, on the current stream."""
        stream = core_stream(self.parameters.device)
        with span("adam"):
            if stream is None:
                reference.adam(
                    self.parameters, self.gradients, self._average, self._square, self._largest, self.segments,
                    self.groups, self._decoupled, self.clip, self.loss_scale, self.found_inf,
                )  # fmt: skip
                return
            states = _pointer(self._average), _pointer(self._square), _pointer(self._largest)
            _core.adam(self._pointers, *states, self._decoupled, stream)
        note_written(self.written)


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
    one per segment and one over the buffers; nobody waits, so the table is not checked there: segments that overlap
    give undefined values, and segments outside the buffers are an illegal memory access.

    Raises:
        TypeError, ValueError: a dtype, shape or device that is not named above; on the CPU also segments outside the
            buffers, groups that are not there, and momentum without a buffer.
    """
    FlatSgd(
        parameters, gradients, momentum, segments, groups, clip=clip, loss_scale=loss_scale, found_inf=found_inf
    ).step()


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
    FlatAdam(
        parameters, gradients, exp_avg, exp_avg_sq, segments, groups, decoupled=False,
        max_exp_avg_sq=max_exp_avg_sq, clip=clip, loss_scale=loss_scale, found_inf=found_inf,
    ).step()  # fmt: skip


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
    FlatAdam(
        parameters, gradients, exp_avg, exp_avg_sq, segments, groups, decoupled=True,
        max_exp_avg_sq=max_exp_avg_sq, clip=clip, loss_scale=loss_scale, found_inf=found_inf,
    ).step()  # fmt: skip
