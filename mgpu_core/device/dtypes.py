"""What the core calls the dtypes that it can do arithmetic with."""

from __future__ import annotations

import torch

__all__ = ["FLOATING", "REAL"]

FLOATING = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
REAL = {**FLOATING, torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8"}
