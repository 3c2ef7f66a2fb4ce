"""Whether all ranks hold the same bits."""

from __future__ import annotations

import torch

from mgpu_core.engine.replicas import Replicas

__all__ = ["first_difference"]


def first_difference(replicas: Replicas) -> tuple[str, int] | None:
    """The name of the first parameter that is not the same on all ranks, and the first rank where it is not."""
    for i, name in enumerate(replicas.names):
        own = _bits(replicas.own[i])
        for rank in replicas.team.ranks:
            if not torch.equal(_bits(replicas.parameters[rank][i]).to(own.device), own):
                return name, rank
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements, so that NaN equals NaN and -0 does not equal 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
