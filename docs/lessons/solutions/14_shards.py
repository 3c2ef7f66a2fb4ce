"""Lesson 14, shards: a solution."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

Block = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cut(tensors: Sequence[torch.Tensor], devices: int) -> list[torch.Tensor]:
    """The size is rounded up, the rest is zeros, and clone gives each part its memory."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    size = -(-len(flat) // devices)
    padded = pad(flat, (0, size * devices - len(flat)))
    return [part.clone() for part in padded.split(size)]


def forward(
    layers: Sequence[tuple[Sequence[torch.Tensor], Block]],
    memory: Any,
    x: torch.Tensor,
) -> torch.Tensor:
    """What is taken is freed in `finally`."""
    for parts, block in layers:
        whole = memory.take(sum(map(len, parts)))
        try:
            torch.cat(list(parts), out=whole)
            x = block(whole, x)
        finally:
            memory.free(whole)
    return x


def update(
    parts: Sequence[torch.Tensor],
    moments: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    lr: float,
    momentum: float,
) -> None:
    """A slice of a gradient ends where the gradient ends: the padding is left alone."""
    for rank, (part, moment) in enumerate(zip(parts, moments, strict=True)):
        begin = rank * len(part)
        total = sum(gradient[begin : begin + len(part)] for gradient in gradients)
        moment[: len(total)].mul_(momentum).add_(total)
        part[: len(total)].sub_(moment[: len(total)], alpha=lr)
