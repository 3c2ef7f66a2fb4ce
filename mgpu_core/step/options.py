"""The arguments of a step, its module and devices: checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from mgpu_core.comm.reductions import ALGORITHMS
from mgpu_core.devices.dtypes import AMP_DTYPES
from mgpu_core.ranks.random import check_rng
from mgpu_core.ranks.team import Team
from mgpu_core.ranks.worker_choice import check_workers
from mgpu_core.step.window import REDUCTIONS
from mgpu_core.trees.module_tree import named_parameters_of

__all__ = ["ARGUMENTS", "Options", "nonfinite_is_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of a step, all of which :class:`mgpu_core.TrainStep` describes.

    Raises:
        TypeError, ValueError: arguments that cannot be, or do not fit together.
    """

    module: Module
    loss_fn: Callable[..., Any] | None
    optimizer: Optimizer
    team: Team
    has_processes: bool
    dim: int
    reduction: str
    loss_on: str
    amp_dtype: torch.dtype | None
    accumulate: int
    clip_norm: float | None
    error_if_nonfinite: bool
    shard: str | None
    bucket_nbytes: int
    comm_dtype: torch.dtype | None
    algorithm: str
    workers: str
    rng: str
    static_graph: bool
    capture: bool

    def __post_init__(self) -> None:
        _check_choice("reduction", self.reduction, REDUCTIONS)
        _check_choice("loss_on", self.loss_on, ("ranks", "gathered"))
        _check_choice("algorithm", self.algorithm, ALGORITHMS)
        if self.shard not in (None, "optimizer", "parameters"):
            raise ValueError(f'shard must be None, "optimizer" or "parameters", not {self.shard!r}')
        if self.shard == "parameters" and (self.capture or self.static_graph):
            name = "capture" if self.capture else "static_graph"
            raise ValueError(f'shard="parameters" does not go with {name}=True: its blocks come and go')
        check_workers(self.workers)
        check_rng(self.rng)
        self._check_numbers()
        self._check_dtypes()

    def _check_numbers(self) -> None:
        calls, norm = self.accumulate, self.clip_norm
        if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
            raise ValueError(f"accumulate must be a whole number of calls per update, 1 or more, not {calls!r}")
        is_number = isinstance(norm, int | float) and not isinstance(norm, bool)
        if norm is not None and not (is_number and 0 < norm < float("inf")):
            raise ValueError(f"clip_norm must be a positive number, not {norm!r}")
        if self.bucket_nbytes < 1:
            raise ValueError(f"bucket_nbytes must be a positive number of bytes, not {self.bucket_nbytes}")

    def _check_dtypes(self) -> None:
        if self.amp_dtype is not None and self.amp_dtype not in AMP_DTYPES:
            raise TypeError(f"amp_dtype must be torch.bfloat16 or torch.float16, not {self.amp_dtype}")
        if self.comm_dtype is not None and not self.comm_dtype.is_floating_point:
            raise TypeError(f"comm_dtype must be a floating dtype, not {self.comm_dtype}")
        if self.has_processes and self.comm_dtype is not None and self.comm_dtype.itemsize < 2:
            raise TypeError(f"comm_dtype between processes must have 16 bits or more, which {self.comm_dtype} has not")

    def why_not_over(self, kind: type[Module], *refused: str) -> str | None:
        """Return which of these arguments a step over a module of this kind was given; ``None``: none, or another kind.

        Args:
            kind: which does not take them.
            refused: their names.
        """
        if not isinstance(self.module, kind):
            return None
        given = {
            "process_group": self.has_processes,
            'loss_on="gathered"': self.loss_on == "gathered",
            "shard": self.shard is not None,
            "static_graph": self.static_graph,
            "capture": self.capture,
            "dim": self.dim != getattr(self.module, "dim", self.dim),
        }
        names = [name for name in refused if given[name]]
        return f"a step over a {kind.__name__} does not take {names[0]}" if names else None

    def changed(self, name: str, value: Any) -> Options:
        """Return the same arguments with another value of one of :data:`CHANGEABLE`.

        Raises:
            ValueError: a value that no step can have.
            AttributeError: the argument stays.
        """
        if name not in CHANGEABLE:
            raise AttributeError(f"{name} of a step stays as it was given: make a new step")
        if name == "error_if_nonfinite":
            value = nonfinite_is_error(value, self.team)
        return replace(self, **{name: value})

    def shared(self) -> dict[str, Any]:
        """Return the settings that all processes of a step must have in common, by their names."""
        names = "reduction", "accumulate", "clip_norm", "error_if_nonfinite", "amp_dtype", "bucket_nbytes", "comm_dtype"
        shards = len(set(self.team.devices)) if self.shard else 1  # the layout depends on it
        settings = {name: getattr(self, name) for name in names}
        settings |= {"shards": shards, "optimizer": type(self.optimizer).__name__}
        for i, group in enumerate(self.optimizer.param_groups):
            numbers = {name: float(value) for name, value in group.items() if _is_number(value)}
            settings[f"the optimizer's group {i}"] = numbers | {"parameters": len(group["params"])}
        for name, parameter in named_parameters_of(self.module):
            settings[f"parameter {name}"] = tuple(parameter.shape), parameter.dtype
        return settings


CHANGEABLE = ("accumulate", "clip_norm", "error_if_nonfinite")
ARGUMENTS = frozenset(each.name for each in fields(Options)) - {"has_processes"}
"""The names of the arguments that a step has as attributes."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def nonfinite_is_error(asked: bool | None, team: Team) -> bool:
    """Resolve ``error_if_nonfinite``: ``None`` is True on the CPU, where the check waits for no device."""
    return all(device.type == "cpu" for device in team.devices) if asked is None else bool(asked)
