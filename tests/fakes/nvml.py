# ruff: noqa: N802 - the names are pynvml's
"""A pynvml with the GPUs one likes: the functions mgpu_core calls, with NVML's spelling of addresses and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from mgpu_core.devices.discovery import MigInstance, PhysicalDevice

GIB = 2**30
UUIDS = (
    "GPU-9942190a-aa31-4ff1-4aa9-c388d80f85f1",
    "GPU-9e8d35e3-a134-0fdd-0e01-23811fdbd293",
    "GPU-e429a63e-c61c-4795-b757-5132caeb8e70",
    "GPU-47ea263a-58d7-410d-cc82-f7fdece5bd28",
)


def gpu(index: int, name: str = "NVIDIA H200", mig: tuple[MigInstance, ...] | None = None) -> PhysicalDevice:
    """GPU `index` of a machine of four, with 140 GiB of which 139 - index are free."""
    return PhysicalDevice(index, UUIDS[index], f"0000:{index + 1:02x}:00.0", name, 140 * GIB, (139 - index) * GIB, mig)


def instance(number: int) -> MigInstance:
    """The MIG instance `number` of a GPU, with 17 GiB."""
    uuid = f"MIG-{number:08x}-1111-5222-9333-444444444444"
    return MigInstance(uuid, number + 7, 0, f"NVIDIA H200 MIG 1g.18gb #{number}", 17 * GIB, 16 * GIB)


class NVMLError(Exception):
    """NVML's error."""


@dataclass
class FakeNvml:
    """Stands in for the module pynvml; a GPU whose index is in `lost` does not answer."""

    gpus: Sequence[PhysicalDevice] = ()
    lost: Sequence[int] = ()
    starts: bool = True
    as_bytes: bool = False
    memory_known: bool = True
    open_sessions: int = field(default=0, init=False)

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1

    def nvmlInit(self) -> None:
        if not self.starts:
            raise NVMLError("Driver Not Loaded")
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        self.open_sessions -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self._text("580.65.06")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> PhysicalDevice:
        if index in self.lost:
            raise NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: PhysicalDevice | MigInstance) -> str | bytes:
        return self._text(handle.uuid)

    def nvmlDeviceGetName(self, handle: PhysicalDevice | MigInstance) -> str | bytes:
        return self._text(handle.name)

    def nvmlDeviceGetPciInfo(self, handle: PhysicalDevice) -> SimpleNamespace:
        return SimpleNamespace(busId=self._text(f"0000{handle.pci_bus_id.upper()}"))

    def nvmlDeviceGetMemoryInfo(self, handle: PhysicalDevice | MigInstance) -> SimpleNamespace:
        if not self.memory_known:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=handle.memory_total, free=handle.memory_free)

    def nvmlDeviceGetMigMode(self, handle: PhysicalDevice) -> list[int]:
        if "T4" in handle.name:
            raise NVMLError("Not Supported")
        mode = 0 if handle.mig is None else 1
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: PhysicalDevice) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: PhysicalDevice, position: int) -> MigInstance:
        # The first slot stays empty: an instance that was destroyed leaves a hole.
        if position == 0 or handle.mig is None or position > len(handle.mig):
            raise NVMLError("Not Found")
        return handle.mig[position - 1]

    def nvmlDeviceGetGpuInstanceId(self, handle: MigInstance) -> int:
        return handle.gpu_instance

    def nvmlDeviceGetComputeInstanceId(self, handle: MigInstance) -> int:
        return handle.compute_instance

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.as_bytes else text
