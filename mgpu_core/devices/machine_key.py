"""The key under which a measurement is valid: these GPUs, this driver, this build."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from mgpu_core import _core

__all__ = ["machine_key"]


@cache
def _software() -> dict[str, Any]:
    details = {name: detail for name, _, detail in _core.backends()}
    return {
        "driver": _core.driver_version("cuda"),
        "build": f"{importlib.metadata.version('mgpu-core')}, {details.get('cuda', '')}",
        "torch": str(torch.__version__),
    }


def machine_key(devices: Sequence[int]) -> dict[str, Any]:
    """Return the UUIDs of these GPUs, in this order, with driver and build."""
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    return {"gpus": uuids, **_software()}
