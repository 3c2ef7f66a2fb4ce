"""The environment of a trace, for its headers: versions and names, no paths."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import torch

from mgpu_core import _core

__all__ = ["cpu_model", "environment"]


def environment() -> dict[str, str]:
    """Return facts by name, in the order in which to show them."""
    gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return {
        "mgpu_core": importlib.metadata.version("mgpu-core"),
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "GPU": counted or "none",
        "CPU threads": f"torch {torch.get_num_threads()}, mgpu_core {_core.num_threads()}",
    }


def cpu_model() -> str:
    """Return the processor's name, as far as the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
