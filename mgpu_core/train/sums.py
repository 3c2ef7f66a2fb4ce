"""Summed gradients, as norm, clipping and overflow see them: those of a step, or what one of its devices has."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["Sums"]


@dataclass(slots=True)
class Sums:
    """Summed gradients.

    Attributes:
        parts: per device the flat sums that it updates by: all of them, or its shards.
        padding: per device, and per flat sum of it, the places between its gradients; there is always 0.
        every_sum: flat tensors that hold each sum once.
        sparse: the sums of sparse gradients, by parameter.
    """

    parts: list[list[torch.Tensor]] = field(default_factory=list)
    padding: list[list[torch.Tensor]] = field(default_factory=list)
    every_sum: list[torch.Tensor] = field(default_factory=list)
    sparse: dict[int, torch.Tensor] = field(default_factory=dict)

    def on(self, place: int) -> Sums:
        """What one device has, where it has all of them."""
        return Sums([self.parts[place]], [self.padding[place]], self.parts[place])

    def sample(self) -> Sums:
        """Return sums of the same dtypes and devices that hold a few ones."""
        parts = [[torch.ones(8, dtype=flat.dtype, device=flat.device) for flat in flats] for flats in self.parts]
        padding = [[torch.zeros(1, dtype=torch.int64, device=flat.device) for flat in flats] for flats in self.parts]
        return Sums(parts, padding, parts[0])
