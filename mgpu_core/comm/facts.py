"""Which rows are whose, and what a bucket holds, for a recording."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_core.comm.layout import nbytes_of
from mgpu_core.entries import Contents, Cut
from mgpu_core.record import is_on, keep

__all__ = ["tell_contents", "tell_cut"]


def tell_cut(
    step: str, name: str, whole: torch.device, parts: Sequence[torch.Tensor], dim: int, route: str = "copy"
) -> None:
    """Of a tensor on ``whole`` and its ranks' parts along ``dim``; nothing when no recording is on."""
    if not is_on():
        return
    counts = tuple(part.size(dim) if part.dim() else 1 for part in parts)
    shapes = tuple(tuple(part.shape) for part in parts)
    dtype = str(parts[0].dtype).removeprefix("torch.")
    nbytes = tuple(map(nbytes_of, parts))
    devices = tuple(str(part.device) for part in parts)
    keep(
        lambda host_ns, thread: Cut(
            step, name, dim, counts, shapes, dtype, nbytes, route, str(whole), devices, host_ns, thread
        )
    )


def tell_contents(step: str, bucket: int, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Of a bucket, the tensors by name; nothing when no recording is on."""
    if not is_on():
        return
    names, nbytes = tuple(name for name, _ in named), tuple(nbytes_of(tensor) for _, tensor in named)
    keep(lambda host_ns, thread: Contents(step, bucket, names, nbytes, host_ns, thread))
