"""Optimizers that own their memory: flat state, one kernel per device and dtype, torch's interface.

``SGD``, ``Adam`` and ``AdamW`` take the arguments of ``torch.optim``'s and are subclasses of them; a ``state_dict``
of the one loads into the other.  A further optimizer is a row of :mod:`mgpu_core.optim.rules` and a kernel: ``Lion``.
Inside a :class:`~mgpu_core.TrainStep` clipping and the loss scale go into the kernel: ``grad`` holds the sums as they
were before.  With ``shard="optimizer"`` each device keeps a part of the state, and ``state`` shows none of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mgpu_core.optim import rules
from mgpu_core.optim.optimizer import FlatOptimizer

__all__ = ["SGD", "Adam", "AdamW", "FlatOptimizer", "Lion"]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"mgpu_core.optim has no {name!r}, but SGD, Adam, AdamW and Lion; a step takes any optimizer of torch.optim"
    )


class SGD(FlatOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` by our kernel."""

    rule = rules.SGD


class Adam(FlatOptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` by our kernel, amsgrad and decoupled weight decay included."""

    rule = rules.ADAM


class AdamW(FlatOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` by our kernel."""

    rule = rules.ADAM


class Lion(FlatOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an average moves each parameter by ``lr``.

    Args:
        params: parameters, or groups of them, as torch's optimizers take them.
        lr: the size of each move.
        betas: weights of the average in the move, and in the average itself.
        weight_decay: decoupled: parameters shrink by ``lr * weight_decay``.
        maximize: go up instead of down.

    Raises:
        ValueError: settings that are negative, or betas outside [0, 1).
    """

    rule = rules.LION

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr and weight_decay must not be negative, but are {lr} and {weight_decay}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), but are {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})
