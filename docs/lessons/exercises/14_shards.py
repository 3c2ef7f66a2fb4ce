"""Lesson 14, shards: write the three functions, then run `mgpu lesson check 14`.

Plain torch is all you need.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Block = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cut(tensors: Sequence[torch.Tensor], devices: int) -> list[torch.Tensor]:
    """All numbers of the tensors, end to end in one row, as one flat part per device.

    The parts are equally long, and as short as can be; zeros fill up the end.  Each has memory of its own: a view
    would keep that of the whole.
    """
    raise NotImplementedError


def forward(
    layers: Sequence[tuple[Sequence[torch.Tensor], Block]],
    memory: Any,
    x: torch.Tensor,
) -> torch.Tensor:
    """The output of a chain of layers, each of which has its parts, as `cut` makes them, and a function.

    `memory.take(count)` returns a flat float64 tensor of so many numbers, whatever they are, and `memory.free(tensor)`
    gives it back.  Fill one with the parts, call `x = block(whole, x)`, and free it before the next layer is filled:
    there is room for one.  It is freed if the block raises, too.
    """
    raise NotImplementedError


def update(
    parts: Sequence[torch.Tensor],
    moments: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    lr: float,
    momentum: float,
) -> None:
    """A step of SGD: device r adds up its own part of all gradients, and updates parts[r] and moments[r] in place.

    gradients[rank] is flat, of all numbers, and without padding.  moment = momentum * moment + sum, and then
    part = part - lr * moment.  The padding stays zero.
    """
    raise NotImplementedError
