"""The measurements to make: the arguments of ``advise``, validated before any of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from mgpu_core import optim
from mgpu_core.devices.devices import CPU, DeviceLike, as_devices, default_devices
from mgpu_core.step.arguments import check_module
from mgpu_core.step.losses import output_loss
from mgpu_core.tools.advise.batches import Batch, batch_sizes
from mgpu_core.trace.tracer import is_tracing

__all__ = ["CPU_RANKS", "REPEATS", "SECONDS", "MakeOptimizer", "AdvicePlan", "plan_of"]

MakeOptimizer = Callable[[list[torch.nn.Parameter]], Optimizer]

CPU_RANKS = 2
"""The number of CPU ranks to compare with one, without an accelerator and without ``device_ids``."""

REPEATS, SECONDS = 7, 60.0
"""Of each measurement, and for all of them, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class AdvicePlan:
    """Arguments that fit together.

    Attributes:
        devices: one per rank.
        batches: rows of each batch to measure, in order; the sample's own among them.
        seconds: for all of it.
        device_nbytes: the memory of one device; ``None``: as the device says.
    """

    net: Module
    loss_fn: Callable[..., Any] | None
    sample: Batch
    devices: tuple[torch.device, ...]
    batches: tuple[int, ...]
    optimizer: MakeOptimizer
    loader: Iterable[Any] | None
    repeats: int
    seconds: float
    device_nbytes: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows of the sample."""
        return self.sample[0].size(0)

    @property
    def distinct_devices(self) -> tuple[torch.device, ...]:
        """The devices, each once."""
        return tuple(dict.fromkeys(self.devices))


def plan_of(
    net: Module,
    loss_fn: Callable[..., Any] | None,
    sample: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    *,
    device_ids: Sequence[DeviceLike] | None = None,
    batches: Sequence[int] | None = None,
    optimizer: MakeOptimizer | None = None,
    loader: Iterable[Any] | None = None,
    repeats: int = REPEATS,
    seconds: float = SECONDS,
    device_nbytes: int | None = None,
) -> AdvicePlan:
    """Return the plan; see :func:`mgpu_core.advise` for arguments and errors."""
    check_module(net)
    if isinstance(sample, Mapping):
        net, sample = _by_name(net, loss_fn, sample)
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function or None, not {loss_fn!r}")
    if optimizer is not None and not callable(optimizer):
        raise TypeError(
            "optimizer is a function from parameters to an optimizer, such as "
            f"lambda parameters: torch.optim.AdamW(parameters), not a {type(optimizer).__name__}"
        )
    _check_sample(sample, with_target=loss_fn is not None)
    _check_repeats(repeats, seconds)
    if device_nbytes is not None and (not _is_whole(device_nbytes) or device_nbytes < 1):
        raise ValueError(f"device_nbytes must be a whole number of bytes, 1 or more, not {device_nbytes!r}")
    devices = as_devices(default_devices() or [CPU] * CPU_RANKS if device_ids is None else device_ids)
    rows = sample[0].size(0)
    if rows < len(devices):
        raise ValueError(f"the sample has {rows} rows for {len(devices)} ranks: some rank would have none")
    sizes = batch_sizes(rows, len(devices)) if batches is None else _sizes(batches, rows, len(devices))
    if is_tracing():
        raise RuntimeError("a recording is on, and would be measured too: call advise() outside of it")
    make = _sgd if optimizer is None else optimizer
    return AdvicePlan(net, loss_fn, tuple(sample), devices, sizes, make, loader, repeats, float(seconds), device_nbytes)


class _ByName(Module):
    """A net that takes its inputs by name, and returns its loss."""

    def __init__(self, net: Module, names: Sequence[str]) -> None:
        super().__init__()
        self.net, self.names = net, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the loss."""
        return output_loss(self.net(**dict(zip(self.names, inputs, strict=True))))


def _by_name(
    net: Module, loss_fn: object, sample: Mapping[str, torch.Tensor]
) -> tuple[Module, tuple[torch.Tensor, ...]]:
    """Return the net and the sample for inputs by position.

    Raises:
        ValueError: with a ``loss_fn``, which has no target then.
    """
    if loss_fn is not None:
        raise ValueError("a sample by name has no target: pass loss_fn=None, where the module returns the loss")
    return _ByName(net, tuple(sample)), tuple(sample.values())


def _sgd(parameters: list[torch.nn.Parameter]) -> Optimizer:
    """Step that change nothing: weights stay sane, however often the same batch comes."""
    return optim.SGD(parameters, lr=0.0)


def _check_sample(sample: object, *, with_target: bool) -> None:
    wanted = "(inputs..., target)" if with_target else "(inputs...)"
    if not isinstance(sample, tuple | list) or not sample:
        raise TypeError(f"sample must be a tuple of tensors, {wanted} of one batch, not {_described(sample)}")
    for index, value in enumerate(sample):
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            raise TypeError(f"sample[{index}] must be a tensor with rows along dimension 0, not {_described(value)}")
    if with_target and len(sample) < 2:
        raise ValueError("sample has no target: wanted (inputs..., target); loss_fn=None if the module gives the loss")
    for index, tensor in enumerate(sample):
        if tensor.size(0) != sample[0].size(0):
            shapes = f"sample[0] has shape {tuple(sample[0].shape)}, sample[{index}] {tuple(tensor.shape)}"
            raise ValueError(f"the sample's tensors differ in their number of rows: {shapes}")


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "an empty one" if isinstance(value, tuple | list) and not value else f"a {type(value).__name__}"


def _check_repeats(repeats: object, seconds: object) -> None:
    if not _is_whole(repeats) or repeats < 1:  # type: ignore[operator]
        raise ValueError(f"repeats must be a whole number, 1 or more, not {repeats!r}")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < math.inf:  # type: ignore[operator]
        raise ValueError(f"seconds must be a positive number, not {seconds!r}")


def _sizes(batches: Sequence[int], rows: int, ranks: int) -> tuple[int, ...]:
    for size in batches:
        if not _is_whole(size) or size < ranks:
            raise ValueError(
                f"a batch must be a whole number of rows, at least one for each of {ranks} ranks: {size!r}"
            )
    return tuple(sorted({*batches, rows}))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
