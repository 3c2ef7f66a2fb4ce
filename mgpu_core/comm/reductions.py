"""The reductions: operations, algorithms, dtypes, and how the core counts elements."""

from __future__ import annotations

import torch

from mgpu_core.devices.dtypes import REAL

__all__ = ["ALGORITHMS", "BETWEEN_GPUS", "CORE_DTYPES", "OPS", "check_op", "core_count"]

OPS = ("sum", "avg", "prod", "min", "max")
ALGORITHMS = ("auto", "naive", "direct", "push", "ring", "tree", "nccl")
BETWEEN_GPUS = ("push", "nccl")  # and not in host memory
CORE_DTYPES = {**REAL, torch.complex64: "float32", torch.complex128: "float64"}
_GENERIC_DTYPES = (torch.int8, torch.int16)


def check_op(op: str, dtype: torch.dtype, algorithm: str = "auto") -> None:
    """Raise unless the reduction exists: ValueError for a name, TypeError for a dtype."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if dtype.is_complex and op not in ("sum", "avg"):
        raise TypeError(f"{dtype} tensors can be reduced by sum and avg, not by {op}")
    if dtype not in CORE_DTYPES and dtype not in _GENERIC_DTYPES:
        raise TypeError(f"tensors of {dtype} cannot be reduced")


def core_count(tensor: torch.Tensor) -> int:
    """Return the number of elements for the core, to which a complex number is a pair."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)
