"""Turn users' device arguments into ``torch.device`` objects that exist.

An int is an index of the current accelerator (CUDA where there is none), a string or ``torch.device`` is itself, -1 is
the CPU (with torch's warning).  A CPU device has no index here: the index in the list says which rank it is.  Where
there is no accelerator and ``MGPU_CORE_CPU_RANKS`` is set, every accelerator means the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import torch

from mgpu_core.devices.plug_ins import accelerator_type, indices_of, is_one_per_process
from mgpu_core.support.warnings import warn_user

__all__ = [
    "CPU",
    "DeviceLike",
    "accelerators",
    "as_device",
    "as_devices",
    "cpu_ranks",
    "default_devices",
    "has_accelerator",
    "local_devices",
    "names_accelerator",
]

DeviceLike: TypeAlias = int | str | torch.device

CPU = torch.device("cpu")


def _from_index(index: int) -> torch.device:
    if index == -1:
        warn_user(
            "Using -1 to represent CPU tensor is deprecated. Please use a "
            'device object or string instead, e.g., "cpu".',
            FutureWarning,
        )
        return CPU
    if index < 0:
        raise ValueError(f"a device index is 0 or more, or -1 for the CPU, not {index}")
    kind = accelerator_type()
    return _existing(kind, index, f"{kind}:{index}")


def as_device(device: DeviceLike) -> torch.device:
    """Return the device that is meant, with its index.

    Raises:
        TypeError: not an int, a string or a ``torch.device``.
        ValueError: a device that does not exist on this machine; the message says how many there are.
    """
    if type(device) is torch.device and device.type == "cpu":
        return CPU
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise TypeError(f"a device is an int, a string or a torch.device, not {device!r}")
    if isinstance(device, int):
        return _from_index(device)
    torch_device = _from_text(device) if isinstance(device, str) else device
    if torch_device.type == "cpu":
        return CPU
    index = torch_device.index
    if index is None and indices_of(torch_device.type):
        index = torch.accelerator.current_device_index()
    return _existing(torch_device.type, index, str(device))


def _existing(kind: str, index: int | None, asked: str) -> torch.device:
    here = indices_of(kind)
    if index is None or index not in here:  # torch.device keeps 8 bits of an index: it may be negative here
        if cpu_ranks() and not has_accelerator():
            return CPU
        if here and is_one_per_process(kind):
            raise ValueError(
                f"device {asked} is not this process's: a process has one {kind} device, here {kind}:{here[0]}. Start "
                f'a process for each, or let ranks share it: ["{kind}"] * 2'
            )
        advice = "" if has_accelerator() else '; two ranks on the CPU are ["cpu"] * 2'
        raise ValueError(f"device {asked} does not exist: torch sees {len(here)} {kind} devices here{advice}")
    return torch.device(kind, index)


def has_accelerator() -> bool:
    """Return whether torch sees any accelerator here."""
    return torch.accelerator.device_count() > 0


def names_accelerator(device: object) -> bool:
    """Return whether this is an accelerator's index, or names one of its devices, existing or not.

    Raises:
        ValueError: a string that is no device.
    """
    if isinstance(device, str):
        device = _from_text(device)
    if isinstance(device, torch.device):
        return device.type not in ("cpu", "meta")
    return isinstance(device, int) and not isinstance(device, bool) and device >= 0


def cpu_ranks() -> int:
    """Return the number of CPU ranks that ``MGPU_CORE_CPU_RANKS`` asks for; 0 without it.

    Raises:
        ValueError: it is not a whole number of 0 or more.
    """
    return _number("MGPU_CORE_CPU_RANKS", 0)


def _from_text(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"{text!r} is not a device: {str(error).splitlines()[0]}") from None


def as_devices(devices: Sequence[DeviceLike], name: str = "device_ids") -> tuple[torch.device, ...]:
    """Return one device per rank; the same one may come more than once.  ``name`` is the argument's, for messages.

    Raises:
        TypeError, ValueError: as :func:`as_device`; also an empty list.
    """
    if isinstance(devices, str | int | torch.device):
        raise TypeError(f'{name} is a list with one entry per rank, such as [0, 1] or ["cpu"] * 2, not {devices!r}')
    if not len(devices):
        raise ValueError(f"{name} is empty: one entry per rank is wanted")
    return tuple([as_device(device) for device in devices])


def local_devices() -> list[torch.device]:
    """Return this process's part of the default devices, if a launcher started several processes on the machine.

    ``torchrun`` tells each process which one it is, in ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``; accelerators are dealt
    out among them, neighbours to one process.  CPU ranks are each process's own, and so is a TPU.

    Raises:
        ValueError: fewer accelerators than processes; or the variables are no such numbers.
    """
    devices = default_devices()
    processes = _number("LOCAL_WORLD_SIZE", 1)
    process = _number("LOCAL_RANK", 0)
    if process >= processes:
        raise ValueError(f"LOCAL_RANK must be less than LOCAL_WORLD_SIZE, which is {processes}, not {process}")
    if not devices or devices[0].type == "cpu" or is_one_per_process(devices[0].type) or processes == 1:
        return devices
    if len(devices) < processes:
        raise ValueError(
            f"{len(devices)} devices for {processes} processes on this machine: start fewer, or pass device_ids if "
            "each process sees devices of its own"
        )
    ends = [len(devices) * i // processes for i in range(processes + 1)]
    return devices[ends[process] : ends[process + 1]]


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number of 0 or more, not {text!r}")
    if len(text) > 4:
        raise ValueError(f"{name} must be a whole number up to 9999, not {text}")
    return int(text)


def default_devices() -> list[torch.device]:
    """Return the accelerators that this process can use; without any, the CPU ranks of ``MGPU_CORE_CPU_RANKS``.

    Raises:
        ValueError: ``MGPU_CORE_CPU_RANKS`` is not a whole number of 0 or more.
    """
    return accelerators() or [CPU] * cpu_ranks()


def accelerators() -> list[torch.device]:
    """Return the current accelerator's devices that this process can use."""
    kind = accelerator_type()
    return [torch.device(kind, index) for index in indices_of(kind)]
