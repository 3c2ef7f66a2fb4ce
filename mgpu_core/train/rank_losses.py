"""The loss function of each rank."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.device.team import Team
from mgpu_core.module_tree import modules_of, parameters_of
from mgpu_core.train.replicas import Replicas

__all__ = ["RankLosses", "check_loss"]


class RankLosses:
    """What each rank calls: a function is everybody's, and so is a module without memory.

    One with buffers (class weights, a running centre) is treated as the net is: rank 0's is the user's own, and the
    others follow its buffers and modes.  Only one on another device than rank 0 is copied there, once.

    Args:
        loss_fn: the user's; ``None``: the module returns the loss.
        team: the ranks.

    Attributes:
        functions: per rank.
        replicas: of a module with memory, one; else none.
        modules: of the user's own, whose buffers a forward may move.

    Raises:
        TypeError: a module that cannot be copied.
    """

    def __init__(self, loss_fn: Any, team: Team) -> None:
        self.functions: list[Any] = [loss_fn] * len(team)
        self.modules: list[Module] = []
        self.replicas: list[Replicas] = []
        if isinstance(loss_fn, Module) and (memory := _memory_of(loss_fn)):
            if any(each.device != team.devices[0] for each in memory):
                loss_fn = copy.deepcopy(loss_fn).to(team.devices[0])
            self.replicas = [Replicas(loss_fn, team)]
            self.functions, self.modules = list(self.replicas[0].modules), list(modules_of(loss_fn))
        self._versions = [each.versions for each in self.replicas]

    def follow(self) -> None:
        """Before a call: gives all ranks the buffers, modes and values of the user's.

        Raises:
            RuntimeError: it has other parameters than it had, or elsewhere.
        """
        for replicas in self.replicas:
            replicas.follow()
            replicas.buffers.mirror()
            if self._versions != [replicas.versions]:
                self._versions = [replicas.versions]
                replicas.send_values()


def check_loss(loss_fn: Any) -> None:
    """What no step can have.

    Raises:
        TypeError: something that cannot be called.
        ValueError: a module with parameters that require grad, which nobody would update.
    """
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable, or None where the module returns the loss, not {loss_fn!r}")
    if isinstance(loss_fn, Module) and any(parameter.requires_grad for parameter in parameters_of(loss_fn)):
        raise ValueError(
            f"{type(loss_fn).__name__} has parameters of its own: make it part of the module, which then returns the "
            "loss, and pass loss_fn=None"
        )


def _memory_of(module: Module) -> list[torch.Tensor]:
    return list(chain(parameters_of(module), module.buffers()))
