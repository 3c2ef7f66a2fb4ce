"""Many small tensors as one: laid end to end in a flat buffer, moved in one message, and taken apart again.

A message between two devices costs some microseconds however small it is, and a model has hundreds of small
parameters.  A large tensor travels alone: packing it would only be another pass over its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch

from mgpu_core.comm.layout import one_layout

__all__ = ["flat", "groups", "kind_of", "unpack_into"]

SMALL_NBYTES = 256 * 1024

K = TypeVar("K", bound=Hashable)


def kind_of(tensors: Sequence[torch.Tensor | None], source: torch.Tensor | None = None) -> tuple[Hashable, ...] | None:
    """Return the key that tensors of one message share; ``None`` for a tensor that travels alone."""
    present = [tensor for tensor in tensors if tensor is not None]
    first = present[0]
    if len(present) < len(tensors) or not one_layout(present) or not 0 < first.nbytes <= SMALL_NBYTES:
        return None
    return (first.dtype, *((tensor.device, tensor is source) for tensor in present))


def groups(positions: Iterable[int], key: Callable[[int], K | None]) -> tuple[list[list[int]], list[int]]:
    """Return groups of two or more positions with the same key; and the positions without a key or alone."""
    by_key: dict[K, list[int]] = {}
    alone = []
    for position in positions:
        name = key(position)
        if name is None:
            alone.append(position)
        else:
            by_key.setdefault(name, []).append(position)
    return [group for group in by_key.values() if len(group) > 1], alone + [
        group[0] for group in by_key.values() if len(group) == 1
    ]


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of dense tensors of one dtype and device, one tensor after the other, in fresh memory."""
    return torch.cat([_line(tensor) for tensor in tensors])


def unpack_into(buffer: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Fill dense tensors, on the buffer's device, from a buffer that :func:`flat` packed."""
    pieces = buffer.split([target.numel() for target in targets])
    torch._foreach_copy_([_line(target) for target in targets], list(pieces))
