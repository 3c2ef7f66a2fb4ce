"""What a step is made from, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from mgpu_core.comm.reductions import ALGORITHMS
from mgpu_core.device.devices import DeviceLike, as_devices, local_devices
from mgpu_core.device.random import check_rng
from mgpu_core.device.team import Team
from mgpu_core.device.worker_choice import check_workers
from mgpu_core.module_tree import named_parameters_of, parameters_of
from mgpu_core.train.grad_scaler import AMP_DTYPES
from mgpu_core.train.loss import REDUCTIONS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Setup", "check_dtypes", "check_module", "check_place", "team_of"]


@dataclass
class Setup:
    """What a step is made from; each as for :class:`mgpu_core.TrainStep`.

    Raises:
        ValueError: a setting that no step can have.
    """

    module: Module
    loss_fn: Callable[..., Any] | None
    optimizer: Optimizer
    team: Team
    process_group: ProcessGroup | None
    # rows and loss
    dim: int
    reduction: str
    loss_on: str
    amp_dtype: torch.dtype | None
    # update
    accumulate: int
    clip_norm: float | None
    error_if_nonfinite: bool | None  # ``None`` becomes what it stands for
    shard_optimizer: bool
    # sums of gradients
    bucket_nbytes: int
    comm_dtype: torch.dtype | None
    algorithm: str
    # how ranks run
    workers: str
    rng: str
    static_graph: bool
    capture: bool

    def __post_init__(self) -> None:
        if self.error_if_nonfinite is None:
            self.error_if_nonfinite = all(device.type == "cpu" for device in self.team.devices)
        check_rng(self.rng)
        check_workers(self.workers)
        self._check_loss_on()
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {self.reduction!r}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {self.algorithm!r}")
        if self.bucket_nbytes < 1:
            raise ValueError(f"bucket_nbytes must be a positive number of bytes, not {self.bucket_nbytes}")
        self._check_calls_and_norm()

    def _check_loss_on(self) -> None:
        if self.loss_on not in ("ranks", "gathered"):
            raise ValueError(f"loss_on must be 'ranks' or 'gathered', not {self.loss_on!r}")
        reasons = (
            (self.loss_fn is None, "loss_fn=None: each rank's module returns its loss"),
            (self.process_group is not None, "process_group: outputs of other processes are not gathered"),
            (self.capture, "capture=True: a graph holds the work of one device"),
        )
        for holds, reason in reasons:
            if self.loss_on == "gathered" and holds:
                raise ValueError(f'loss_on="gathered" does not go with {reason}')

    def change(self, name: str, value: Any) -> None:
        """Takes another value of a setting that is read in each step; ValueError for one that no step can have."""
        made = replace(self, **{name: value})
        setattr(self, name, getattr(made, name))

    def _check_calls_and_norm(self) -> None:
        calls, norm = self.accumulate, self.clip_norm
        if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
            raise ValueError(f"accumulate must be a whole number of calls per update, 1 or more, not {calls!r}")
        is_number = isinstance(norm, int | float) and not isinstance(norm, bool)
        if norm is not None and not (is_number and 0 < norm < float("inf")):
            raise ValueError(f"clip_norm must be a positive number, not {norm!r}")


def check_module(net: Module) -> None:
    """Raises TypeError for something else than a bare module."""
    if not isinstance(net, Module):
        raise TypeError(f"net must be a torch.nn.Module, not {type(net).__name__}")
    if isinstance(net, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise TypeError(f"net is a {type(net).__name__}: pass what it wraps, `net.module`")


def check_dtypes(amp_dtype: torch.dtype | None, comm_dtype: torch.dtype | None, process_group: object) -> None:
    """Raises TypeError for dtypes that forwards or messages cannot have."""
    if amp_dtype is not None and amp_dtype not in AMP_DTYPES:
        raise TypeError(f"amp_dtype must be torch.bfloat16 or torch.float16, not {amp_dtype}")
    if comm_dtype is not None and not comm_dtype.is_floating_point:
        raise TypeError(f"comm_dtype must be a floating dtype, not {comm_dtype}")
    if process_group is not None and comm_dtype is not None and comm_dtype.itemsize < 2:
        raise TypeError(f"comm_dtype between processes must have 16 bits or more, which {comm_dtype} has not")


def team_of(net: Module, device_ids: Sequence[DeviceLike] | None) -> Team:
    """The team that ``device_ids`` means; an empty list is the device of the module."""
    if device_ids is None:
        device_ids = local_devices()
    if not isinstance(device_ids, str | int | torch.device) and not len(device_ids):
        device_ids = [next((each.device for each in parameters_of(net)), torch.device("cpu"))]
    return Team.of(as_devices(device_ids))


def check_place(net: Module, team: Team) -> None:
    """Moves the module to the only device, as the drop-in does; several devices: it must be on the first."""
    if len(team) == 1:
        net.to(team.devices[0])
    for name, tensor in [*named_parameters_of(net), *net.named_buffers()]:
        if tensor.device != team.devices[0]:
            raise RuntimeError(
                f"net must have its parameters and buffers on {team.devices[0]} (device_ids[0]), but {name} is on "
                f"{tensor.device}"
            )
