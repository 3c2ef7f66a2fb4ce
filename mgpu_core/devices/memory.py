"""Memory: tell torch when it was written through a pointer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["note_written"]

_increment_version = torch._C._increment_version  # what torch.autograd.graph.increment_version ends in


def note_written(tensors: Sequence[torch.Tensor]) -> None:
    """Raise the version of each tensor, as torch's own in-place operations do.

    A graph that saved one of them before then raises torch's version error instead of giving wrong gradients.
    Inference tensors have no version.
    """
    if True in map(torch.Tensor.is_inference, tensors):
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
    if tensors:
        _increment_version(tensors)
