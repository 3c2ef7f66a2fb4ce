"""Name the steps of a forward and backward pass in profilers: ``torch.profiler``, and NVTX for Nsight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch.profiler import record_function

from mgpu_core.trace import tracer

__all__ = ["labels", "name_in_profilers", "profile"]


@contextmanager
def _both(name: str) -> Iterator[None]:
    """Return a ``record_function`` and an NVTX range of one name."""
    torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()


_has_gpus = cache(torch.cuda.is_available)


def name_in_profilers(name: str) -> AbstractContextManager[object]:
    """Return a range of that name in whatever profiler looks."""
    return _both(name) if _has_gpus() else record_function(name)


def labels() -> AbstractContextManager[None]:
    """Name every step of the passes inside in profilers: ``mgpu forward rank 1``.

    For a profiler that is already there, such as Nsight Systems; :func:`profile` starts torch's.  A recording by
    :func:`mgpu_core.explain` does the same.
    """
    return tracer.labelled(name_in_profilers)


@contextmanager
def profile(*, experimental: Mapping[str, Any] | None = None, **options: Any) -> Iterator[torch.profiler.profile]:
    """``torch.profiler.profile`` that sees the ranks.

    The ranks' threads live on from step to step, and torch's profiler does not look into threads that are older than
    itself; here it is told to (``profile_all_threads``).  The steps have names, as under :func:`labels`.

    Args:
        experimental: more settings of torch's ``_ExperimentalConfig``.
        options: of ``torch.profiler.profile``.

    Raises:
        TypeError: settings that torch does not know; ``experimental_config`` itself, which this
            function makes.
    """
    if "experimental_config" in options:
        raise TypeError("profile() makes the experimental_config itself: give its settings as experimental={...}")
    settings = {**(experimental or {}), "profile_all_threads": True}
    config = torch._C._profiler._ExperimentalConfig(**settings)
    with torch.profiler.profile(experimental_config=config, **options) as profiler, labels():
        yield profiler
