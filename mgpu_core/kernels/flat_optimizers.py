"""Optimizer steps over flat buffers: one kernel for all parameters of a bucket.

The parameters of many tensors lie end to end in one flat tensor, their gradients in another, and so does each kind of
state.  A table of segments says where each tensor lies; hyper-parameters, the clip coefficient, the loss scale and the
sign of an overflow are read from the device's memory, so that a step can be captured in a graph and its numbers
changed between replays.

A :class:`FlatKernel` steps over the same buffers again and again, and checks them once; the functions are one such
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mgpu_core import _core
from mgpu_core.devices.dtypes import FLOATING
from mgpu_core.devices.memory import note_written
from mgpu_core.devices.streams import HOST, core_stream
from mgpu_core.kernels import reference
from mgpu_core.kernels.flat_tables import check_rows
from mgpu_core.kernels.tensor_arguments import as_out, as_tensor, check_floating, check_like, check_outs, on_one_device
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer

__all__ = ["FlatKernel", "adam", "adamw", "lion", "sgd"]


class _Kernel(NamedTuple):
    """One row of the table of optimizers.

    Attributes:
        states: their names, in the order of the kernel's arguments.
        optional: those that may be ``None``.
        core: called with the flat buffers, the addresses of gradients, the states' addresses, ``extra`` and the stream.
        reference: called with parameters, gradients, states, tables, ``extra`` and the scalars.
        extra: constants of the kernel.
    """

    states: tuple[str, ...]
    optional: frozenset[str]
    core: Callable[..., None]
    reference: Callable[..., None]
    extra: tuple[Any, ...] = ()


_MOMENTS, _MOST = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), frozenset({"max_exp_avg_sq"})
_KERNELS = {
    "sgd": _Kernel(("momentum",), frozenset({"momentum"}), _core.sgd, reference.sgd),
    "adam": _Kernel(_MOMENTS, _MOST, _core.adam, reference.adam, (False,)),
    "adamw": _Kernel(_MOMENTS, _MOST, _core.adam, reference.adam, (True,)),
    "lion": _Kernel(("exp_avg",), frozenset(), _core.lion, reference.lion),
}
_SCALARS = {"clip": torch.float64, "found_inf": torch.float32}


class FlatKernel:
    """Steps of one optimizer over the same buffers, in place.

    Args:
        name: ``sgd``, ``adam``, ``adamw`` or ``lion``.
        states: in the order of the function of that name; ``None`` where there is none of that kind.
        parameters, segments, groups, clip, found_inf: as for :func:`sgd`.
        gradients: as for :func:`sgd`; ``None``: each step is given them.
    """

    def __init__(
        self,
        name: str,
        parameters: torch.Tensor,
        gradients: torch.Tensor | None,
        states: Sequence[torch.Tensor | None],
        segments: torch.Tensor,
        groups: torch.Tensor,
        **scalars: torch.Tensor | None,
    ) -> None:
        parameters = as_out(parameters, "parameters")
        given = {} if gradients is None else {"gradients": as_tensor(gradients, "gradients")}
        segments, groups = as_out(segments, "segments"), as_tensor(groups, "groups")
        scalars = _as_scalars(scalars)
        check_floating("an optimizer", parameters.dtype)
        check_like(parameters, "parameters", (parameters.numel(),), parameters.dtype)
        for tensor in given.values():
            check_like(tensor, "gradients", parameters.shape, parameters.dtype)
        check_like(segments, "segments", (segments.shape[0] if segments.dim() else 0, 5), torch.int64)
        check_like(groups, "groups", (groups.shape[0] if groups.dim() else 0, 6), torch.float64)
        self._device = on_one_device(parameters=parameters, segments=segments, groups=groups, **given, **scalars)
        self._is_on_host = self._device.type == "cpu"
        self._name, self._kernel = name, _KERNELS[name]
        self._flat = parameters, given.get("gradients")
        self._tables, self._scalars = (segments, groups), tuple(scalars.values())
        self._states = self._checked(states)
        self._written = [parameters, segments, *(each for each in self._states if each is not None)]
        self._core_flat, self._state_pointers = self._collect(), [_pointer(each) for each in self._states]

    def _checked(self, states: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the states; raise unless all may be written and the tables fit (a GPU's tables are taken as is)."""
        parameters, gradients = self._flat
        segments, groups = self._tables
        names, optional = self._kernel.states, self._kernel.optional
        given = {
            name: as_out(state, name)
            for name, state in zip(names, states, strict=True)
            if state is not None or name not in optional
        }
        for name, state in given.items():
            check_like(state, name, parameters.shape, parameters.dtype)
            on_one_device(parameters=parameters, **{name: state})
        outs = {"parameters": parameters, "segments": segments, **given}
        check_outs(list(outs.values()), list(outs), [] if gradients is None else [gradients])
        if self._device.type == "cpu":
            check_rows(segments.tolist(), end=parameters.numel(), groups=groups.shape[0])
        return [given.get(name) for name in names]

    def _collect(self) -> _core.FlatBuffer:
        """Return the core's arguments, with memory where a GPU's first kernel leaves numbers for its second."""
        parameters, gradients = self._flat
        segments, groups = self._tables
        constants = table = 0
        if self._device.type != "cpu":
            shape = len(segments), _core.optimizer_constants()
            self._constants = torch.empty(shape, dtype=torch.float64, device=self._device)
            self._addresses = torch.empty(len(segments), dtype=torch.int64, device=self._device)  # of gradients
            self._known: list[int] = []  # what is in this table
            constants, table = self._constants.data_ptr(), self._addresses.data_ptr()
        clip, found_inf = (_pointer(each) for each in self._scalars)
        return _core.FlatBuffer(
            parameters=parameters.data_ptr(),
            gradients=_pointer(gradients),
            count=parameters.numel(),
            dtype=FLOATING[parameters.dtype],
            segments=segments.data_ptr(),
            segment_count=len(segments),
            constants=constants,
            groups=groups.data_ptr(),
            group_count=len(groups),
            clip=clip,
            found_inf=found_inf,
            gradient_table=table,
        )

    def step(self, gradients: Sequence[torch.Tensor] | None = None) -> None:
        """Make one step on the current stream.

        Args:
            gradients: one per segment, in memory of their own, of the buffers' dtype, each dense with its elements in
                the segment's order; ``None``: they are in the flat buffer.  Not where the step is captured in a graph,
                which would read them wherever those of the latest step are.

        Raises:
            ValueError: on the CPU, a group has momentum, but there is no buffer; a segment that was written to the
                table since is outside the buffers; there are no gradients.
        """
        if gradients is None and self._flat[1] is None:
            raise ValueError("this kernel has no gradients of its own: give them to each step")
        stream = HOST if self._is_on_host else core_stream(self._device)
        extra = self._kernel.extra
        with tracer.span(self._name) if tracer.sink else NULL_CONTEXT:
            if stream is None:
                self._kernel.reference(*self._flat, *self._states, *self._tables, *extra, *self._scalars)
                return
            addresses = None if gradients is None else list(map(torch.Tensor.data_ptr, gradients))
            if addresses is not None and not self._is_on_host:
                self._tell(addresses)
            self._kernel.core(self._core_flat, addresses, *self._state_pointers, *extra, stream)
        note_written(self._written)

    def _tell(self, addresses: list[int]) -> None:
        """Write the gradients' addresses into the device's table, where they are not those of the step before."""
        if addresses != self._known:
            if len(addresses) != len(self._addresses):
                raise ValueError("each segment needs the address of its gradient")
            table = torch.tensor(addresses, dtype=torch.int64, device="cpu")
            if (table % self._flat[0].element_size()).any():
                raise ValueError("a gradient begins at an address that is not a multiple of its elements' size")
            # The numbers are read before the call returns, and the host does not wait for the device.
            self._addresses.copy_(table, non_blocking=True)
            self._known = addresses


def _as_scalars(given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Return the scalars as tensors; raise ValueError unless each is one number of its dtype."""
    scalars: dict[str, torch.Tensor | None] = dict.fromkeys(_SCALARS)
    for name, value in given.items():
        scalar, dtype = None if value is None else as_tensor(value, name), _SCALARS[name]
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype != dtype):
            wanted = str(dtype).removeprefix("torch.")
            raise ValueError(f"{name} must be one {wanted} number, not {tuple(scalar.shape)} {scalar.dtype}")
        scalars[name] = scalar
    return scalars


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def sgd(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    momentum: torch.Tensor | None,
    segments: torch.Tensor,
    groups: torch.Tensor,
    *,
    clip: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Make one step of ``torch.optim.SGD``, in place.

    Args:
        parameters, gradients: flat, ``(count,)``, of one floating dtype and one device.
        momentum: the momentum buffers, like ``parameters``; ``None`` where no group has momentum.
        segments: of :func:`segment_table`; its steps are raised.
        groups: of :func:`sgd_groups`.
        clip: float64 scalar that the gradients are multiplied by.
        found_inf: float32 scalar; where it is not 0 nothing is changed, not even a step.

    Half precision is computed in float32.  On a GPU two launches on the current stream, a short
    one per segment and one over the buffers; the host does not wait, so the table is not checked there: segments that
    overlap give undefined values, and segments outside the buffers are an illegal memory access.

    Raises:
        TypeError, ValueError: a dtype, shape or device that is not named above; on the CPU also segments outside the
            buffers, groups that are not there, and momentum without a buffer.
    """
    FlatKernel("sgd", parameters, gradients, [momentum], segments, groups, clip=clip, found_inf=found_inf).step()


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
    found_inf: torch.Tensor | None = None,
) -> None:
    """Make one step of ``torch.optim.Adam`` (amsgrad with ``max_exp_avg_sq``), in place; see :func:`sgd`.

    Args:
        exp_avg, exp_avg_sq, max_exp_avg_sq: the state, like ``parameters``.
        groups: of :func:`adam_groups`.
    """
    states = [exp_avg, exp_avg_sq, max_exp_avg_sq]
    FlatKernel("adam", parameters, gradients, states, segments, groups, clip=clip, found_inf=found_inf).step()


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
    found_inf: torch.Tensor | None = None,
) -> None:
    """Make one step of ``torch.optim.AdamW``: :func:`adam` with the weight decay apart from the gradient."""
    states = [exp_avg, exp_avg_sq, max_exp_avg_sq]
    FlatKernel("adamw", parameters, gradients, states, segments, groups, clip=clip, found_inf=found_inf).step()


def lion(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    segments: torch.Tensor,
    groups: torch.Tensor,
    *,
    clip: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Make one step of Lion (Chen et al. 2023, arXiv 2302.06675), in place; see :func:`sgd`.

    Args:
        exp_avg: the state, like ``parameters``.
        groups: of :func:`lion_groups`.
    """
    FlatKernel("lion", parameters, gradients, [exp_avg], segments, groups, clip=clip, found_inf=found_inf).step()
