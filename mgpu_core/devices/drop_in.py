"""The devices that ``DataParallel`` is given: as elsewhere, but torch's forgiveness where there is no accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.devices.devices import (
    DeviceLike,
    as_device,
    as_devices,
    cpu_ranks,
    default_devices,
    has_accelerator,
    names_accelerator,
)
from mgpu_core.support.warnings import warn_user

__all__ = ["as_id", "drop_in_devices", "drop_in_output"]


def drop_in_devices(
    device_ids: Sequence[DeviceLike] | None, output_device: DeviceLike | None
) -> tuple[torch.device, ...]:
    """Return one device per rank; none for the plain module.

    Raises:
        TypeError, ValueError: as :func:`~mgpu_core.devices.devices.as_devices`.
    """
    if device_ids is None:
        devices = tuple(default_devices())
        if not devices and output_device is not None and names_accelerator(output_device):
            _warn_plain("output_device", output_device, 2)
        return devices
    if isinstance(device_ids, str | int | torch.device):
        return as_devices(device_ids)  # which refuses it
    device_ids = list(device_ids)
    if not device_ids:
        return ()
    if has_accelerator() or cpu_ranks() or not all(map(names_accelerator, device_ids)):
        return as_devices(device_ids)
    _warn_plain("device_ids", device_ids, max(2, len(device_ids)))
    return ()


def _warn_plain(name: str, value: object, ranks: int) -> None:
    warn_user(
        f"there is no accelerator here, so {name}={value} gives the plain module, as in torch.nn.DataParallel; "
        f'device_ids=["cpu"] * {ranks} gives {ranks} ranks on the CPU'
    )


def as_id(device: torch.device) -> int | torch.device:
    """Return an accelerator's index, as torch keeps it in ``device_ids``; the CPU has none."""
    return device if device.index is None else device.index


def drop_in_output(wanted: DeviceLike | None, device_ids: list[Any]) -> Any:
    """Return where outputs are gathered, as ``device_ids`` has it; ``None`` for the plain module."""
    if wanted is None:
        return device_ids[0] if device_ids else None
    if not device_ids and not has_accelerator() and names_accelerator(wanted):
        return None
    return as_id(as_device(wanted))
