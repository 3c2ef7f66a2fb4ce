"""One table that ties together every name a GPU has.

The same GPU is `cuda:1` for torch, 3 for nvidia-smi, an entry of CUDA_VISIBLE_DEVICES, a UUID and a PCI address.
torch's own answer is the truth about the visible GPUs and their indices; NVML adds nvidia-smi's number, the memory
in use and the GPUs that are hidden. The two are joined by UUID, by PCI address where there is none.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mgpu_core.devices.discovery import MigInstance, PhysicalDevice, Visibility, VisibleDevice, candidates


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """A device as torch describes it; `uuid` has no GPU- or MIG- before it, memory is in bytes."""

    index: int
    uuid: str
    pci_bus_id: str
    name: str
    memory_total: int
    memory_free: int | None = None


@dataclass(frozen=True, slots=True)
class TorchReading:
    """The devices torch sees; when it sees none, `reason` says why."""

    devices: tuple[TorchDevice, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device under all its names; `torch_index` is None for one that this process cannot see.

    `entry` is the part of CUDA_VISIBLE_DEVICES that names it, None when the variable does not; `nvidia_smi_index` is
    None when NVML was not there to ask. Memory is in bytes.
    """

    torch_index: int | None
    entry: str | None
    nvidia_smi_index: int | None
    uuid: str
    pci_bus_id: str
    name: str
    memory_total: int | None
    memory_free: int | None


def read_torch_devices(want_free_memory: bool) -> TorchReading:
    """Ask torch, which initialises CUDA; free memory costs a context on each GPU, so NVML is asked for it first."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return TorchReading(reason="this torch is a CPU-only build")
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.cuda.init()
            count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).split("\n")[0]
        return TorchReading(reason=first_line.split(". ")[0])  # torch goes on with general advice; doctor has its own
    return TorchReading(tuple(_read_torch_device(torch, index, want_free_memory) for index in range(count)))


def map_devices(
    seen: Sequence[TorchDevice], physical: Sequence[PhysicalDevice] | None, read: Visibility
) -> tuple[DeviceRow, ...]:
    """Visible devices in torch's order, then the hidden ones in nvidia-smi's."""
    parts = candidates(physical or ())
    pairs = [(device, _find(device, parts)) for device in seen]
    matched = [part for _, part in pairs if part]
    visible = [_visible_row(device, part, read) for device, part in pairs]
    return tuple(visible + [_hidden_row(part) for part in parts if part not in matched])


def shows(seen: Sequence[TorchDevice], physical: Sequence[PhysicalDevice], read: Visibility) -> bool:
    """Return True if CUDA shows exactly the GPUs that CUDA_VISIBLE_DEVICES, so read, asks for."""
    parts = candidates(physical)
    return tuple(_find(device, parts) for device in seen) == read.devices


def _read_torch_device(torch: Any, index: int, want_free_memory: bool) -> TorchDevice:
    facts = torch.cuda.get_device_properties(index)
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    free = None
    if want_free_memory:
        with suppress(RuntimeError):  # in exclusive mode, held by another process, it gives no context
            free = int(torch.cuda.mem_get_info(index)[0])
    return TorchDevice(index, str(facts.uuid), address, facts.name, facts.total_memory, free)


def _find(device: TorchDevice, parts: Sequence[VisibleDevice]) -> VisibleDevice | None:
    same = [part for part in parts if part.part.uuid in (f"GPU-{device.uuid}", f"MIG-{device.uuid}", device.uuid)]
    same += [part for part in parts if part.physical.pci_bus_id == device.pci_bus_id]
    return same[0] if same else None


def _visible_row(device: TorchDevice, part: VisibleDevice | None, read: Visibility) -> DeviceRow:
    entry = read.requested[device.index] if device.index < len(read.requested) else None
    if part is None:
        unit: TorchDevice | PhysicalDevice | MigInstance = device
        prefix = "MIG-" if read.kind == "MIG-" else "GPU-"
        number, uuid, address = None, prefix + device.uuid, device.pci_bus_id
    else:
        unit = part.part
        number, uuid, address = part.physical.index, unit.uuid, part.physical.pci_bus_id
    total = device.memory_total if unit.memory_total is None else unit.memory_total
    free = device.memory_free if unit.memory_free is None else unit.memory_free
    return DeviceRow(device.index, entry, number, uuid, address, unit.name, total, free)


def _hidden_row(part: VisibleDevice) -> DeviceRow:
    gpu, unit = part.physical, part.part
    return DeviceRow(None, None, gpu.index, unit.uuid, gpu.pci_bus_id, unit.name, unit.memory_total, unit.memory_free)
