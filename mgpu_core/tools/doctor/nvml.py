"""The GPUs of the machine as nvidia-smi sees them: all of them, whatever CUDA_VISIBLE_DEVICES hides.

NVML needs no CUDA context, so asking it changes nothing in this process. It is read through `pynvml` (the package
nvidia-ml-py), which is optional; when it is missing or fails, the reason is kept instead of raised.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mgpu_core.devices.discovery import MigInstance, PhysicalDevice
from mgpu_core.support.extras import cure


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """The answer of NVML; without one `devices` is None and `reason` says why."""

    devices: tuple[PhysicalDevice, ...] | None = None
    driver_version: str | None = None
    problems: tuple[str, ...] = ()
    reason: str | None = None


def read_physical_devices() -> NvmlReading:
    """Ask NVML for every GPU; a GPU that does not answer becomes a line in `problems`."""
    try:
        import pynvml
    except ImportError:
        return NvmlReading(reason=f"nvidia-ml-py is not installed ({cure('pynvml')})")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvmlReading(reason=str(error))
    try:
        return _read_all(pynvml)
    except pynvml.NVMLError as error:
        return NvmlReading(reason=str(error))
    finally:
        pynvml.nvmlShutdown()


def _read_all(nvml: Any) -> NvmlReading:
    devices: list[PhysicalDevice] = []
    problems: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            devices.append(_read_device(nvml, index))
        except nvml.NVMLError as error:
            problems.append(f"GPU {index} does not answer: {error}")
    driver = _or_none(nvml, nvml.nvmlSystemGetDriverVersion)
    return NvmlReading(tuple(devices), None if driver is None else _text(driver), tuple(problems))


def _read_device(nvml: Any, index: int) -> PhysicalDevice:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    address = pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    return PhysicalDevice(index, pci_bus_id=address, mig=_read_instances(nvml, handle), **_read_part(nvml, handle))


def _read_instances(nvml: Any, handle: Any) -> tuple[MigInstance, ...] | None:
    mode = _or_none(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    indices = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    instances = (_or_none(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, position) for position in indices)
    return tuple(_read_instance(nvml, instance) for instance in instances if instance is not None)


def _read_instance(nvml: Any, handle: Any) -> MigInstance:
    return MigInstance(
        gpu_instance=int(nvml.nvmlDeviceGetGpuInstanceId(handle)),
        compute_instance=int(nvml.nvmlDeviceGetComputeInstanceId(handle)),
        **_read_part(nvml, handle),
    )


def _read_part(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the fields that GPUs and instances share."""
    memory = _or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    told = {"uuid": _text(nvml.nvmlDeviceGetUUID(handle)), "name": _text(nvml.nvmlDeviceGetName(handle))}
    return told | {"memory_total": memory and int(memory.total), "memory_free": memory and int(memory.free)}


def pci_address(text: str) -> str:
    """NVML writes the PCI domain with eight digits, lspci and torch with four: one spelling, as in 0000:07:00.0."""
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _or_none(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    # Consumer, shared-memory and restricted GPUs answer NotSupported or NoPermission to some questions.
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    # Releases of pynvml before 11.5 return bytes.
    return value.decode() if isinstance(value, bytes) else value
