"""Switches of torch that are one for the process, and that a forward may turn for its own length.

Each rank that does so (``with sdpa_kernel(...)``, ``with torch.backends.cudnn.flags(...)``) notes what it finds, which
may be what another rank has set, and puts that back last.  So the caller's are put back behind all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["switches_kept"]

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _switches() -> list[_Switch]:
    cuda: Any = torch.backends.cuda
    attention = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
    cudnn = ("enabled", "benchmark", "deterministic")
    return [
        *[(getattr(cuda, f"{name}_enabled"), getattr(cuda, f"enable_{name}")) for name in attention],
        *[(getattr(torch._C, f"_get_cudnn_{name}"), getattr(torch._C, f"_set_cudnn_{name}")) for name in cudnn],
        (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
        (_anomalies, lambda modes: torch.set_anomaly_enabled(*modes)),
        (torch.get_default_dtype, torch.set_default_dtype),
    ]


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


_SWITCHES = _switches()


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
