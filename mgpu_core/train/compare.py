"""Whether all ranks hold the same bits."""

from __future__ import annotations

import torch

from mgpu_core.device.tensor_checks import bytes_of
from mgpu_core.train.replicas import Replicas

__all__ = ["first_difference"]


def first_difference(replicas: Replicas) -> tuple[str, int] | None:
    """The name of the first parameter that is not the same on all ranks, and the first rank where it is not."""
    for i, name in enumerate(replicas.names):
        own = bytes_of(replicas.own[i].detach())  # NaN equals NaN, and -0 does not equal 0
        for rank in replicas.team.ranks:
            if not torch.equal(bytes_of(replicas.parameters[rank][i].detach()).to(own.device), own):
                return name, rank
    return None
