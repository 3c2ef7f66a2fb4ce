"""Switches of torch that are one for the process, and that a forward may turn for its own length.

Each rank that does so (``with sdpa_kernel(...)``, ``with torch.backends.cudnn.flags(...)``) saves the value that it
finds, which another rank may have set, and restores that last.  So the caller's values are restored after all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["switches_kept"]

_cuda: Any = torch.backends.cuda
_ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
_CUDNN = ("enabled", "benchmark", "deterministic")
_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    *[(getattr(_cuda, f"{name}_enabled"), getattr(_cuda, f"enable_{name}")) for name in _ATTENTION],
    *[(getattr(torch._C, f"_get_cudnn_{name}"), getattr(torch._C, f"_set_cudnn_{name}")) for name in _CUDNN],
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.set_anomaly_enabled(*modes),
    ),
    (torch.get_default_dtype, torch.set_default_dtype),
]


@contextmanager
def switches_kept() -> Iterator[None]:
    """Around the work of several ranks."""
    before = [get() for get, _ in _SWITCHES]
    try:
        yield
    finally:
        for (get, put), value in zip(_SWITCHES, before, strict=True):
            if get() != value:
                put(value)
