"""The core's names of the dtypes that it can do arithmetic with."""

from __future__ import annotations

import torch

__all__ = ["AMP_DTYPES", "FLOATING", "REAL", "has_gradients"]

FLOATING = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
AMP_DTYPES = (torch.bfloat16, torch.float16)
"""Those in which a forward may compute under autocast."""
REAL = {**FLOATING, torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8"}


def has_gradients(dtype: torch.dtype) -> bool:
    """Return True if tensors of this dtype can be trained: floating or complex, of more than 8 bits."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
