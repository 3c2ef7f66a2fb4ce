"""What each kernel computes, in plain torch.  Tests compare with it; devices without a kernel of ours use it."""

from __future__ import annotations

import torch

__all__ = ["gather_rows"]


def gather_rows(
    rows: torch.Tensor, index: torch.Tensor, *, scale: float, shift: float, dtype: torch.dtype
) -> torch.Tensor:
    """``rows[index] * scale + shift``, computed in float32 and rounded once to ``dtype``."""
    return (rows[index].to(torch.float32) * scale + shift).to(dtype)
