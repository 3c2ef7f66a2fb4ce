"""One table of all names: torch's index, nvidia-smi's, the entry of the variable, UUID and PCI address."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
from fakes.nvml import GIB, UUIDS, gpu, instance

from mgpu_core.devices.discovery import parse_visible_devices
from mgpu_core.tools.doctor.device_map import (
    DeviceRow,
    TorchDevice,
    TorchReading,
    map_devices,
    read_torch_devices,
    shows,
)

FOUR = [gpu(index) for index in range(4)]


def seen_by_torch(*physical: int) -> list[TorchDevice]:
    return [
        TorchDevice(rank, UUIDS[index].removeprefix("GPU-"), gpu(index).pci_bus_id, "NVIDIA H200", 139 * GIB)
        for rank, index in enumerate(physical)
    ]


def row(index: int, torch_index: int | None, entry: str | None) -> DeviceRow:
    own = gpu(index)
    return DeviceRow(torch_index, entry, index, own.uuid, own.pci_bus_id, own.name, own.memory_total, own.memory_free)


def test_visible_devices_come_first_and_hidden_ones_after():
    read = parse_visible_devices("3,1", FOUR)
    expected = (row(3, 0, "3"), row(1, 1, "1"), row(0, None, None), row(2, None, None))
    assert map_devices(seen_by_torch(3, 1), FOUR, read) == expected


def test_torch_is_believed_about_the_order():
    read = parse_visible_devices(None, FOUR)
    rows = map_devices(seen_by_torch(2, 0, 1, 3), FOUR, read)
    assert [(r.torch_index, r.nvidia_smi_index, r.entry) for r in rows] == [
        (0, 2, None),
        (1, 0, None),
        (2, 1, None),
        (3, 3, None),
    ]


def test_without_nvml_torch_alone_fills_the_row():
    read = parse_visible_devices("GPU-47", None)
    device = dataclasses.replace(seen_by_torch(3)[0], memory_free=5)
    expected = DeviceRow(0, "GPU-47", None, UUIDS[3], "0000:04:00.0", "NVIDIA H200", 139 * GIB, 5)
    assert map_devices([device], None, read) == (expected,)


def test_without_nvml_the_entry_tells_an_instance_from_a_gpu():
    device = dataclasses.replace(seen_by_torch(0)[0], uuid=instance(1).uuid.removeprefix("MIG-"))
    (only,) = map_devices([device], None, parse_visible_devices(instance(1).uuid, None))
    assert only.uuid == instance(1).uuid


def test_memory_that_nvml_does_not_know_comes_from_torch():
    blind = dataclasses.replace(gpu(0), memory_total=None, memory_free=None)
    device = dataclasses.replace(seen_by_torch(0)[0], memory_free=5)
    (only,) = map_devices([device], [blind], parse_visible_devices(None, [blind]))
    assert (only.memory_total, only.memory_free) == (139 * GIB, 5)


def test_a_full_gpu_has_zero_bytes_free_and_not_an_unknown_number():
    full = dataclasses.replace(gpu(0), memory_free=0)
    device = dataclasses.replace(seen_by_torch(0)[0], memory_free=5)
    (only,) = map_devices([device], [full], parse_visible_devices(None, [full]))
    assert only.memory_free == 0


def test_a_mig_instance_is_found_by_its_own_uuid():
    physical = [gpu(0, mig=(instance(0), instance(1)))]
    device = dataclasses.replace(seen_by_torch(0)[0], uuid=instance(1).uuid.removeprefix("MIG-"))
    first, second = map_devices([device], physical, parse_visible_devices("MIG-00000001", physical))
    assert (first.torch_index, first.uuid, first.name) == (0, instance(1).uuid, instance(1).name)
    assert (second.torch_index, second.uuid) == (None, instance(0).uuid)


def test_an_unknown_uuid_is_found_by_its_address():
    device = dataclasses.replace(seen_by_torch(2)[0], uuid="00000000-0000-0000-0000-000000000000")
    rows = map_devices([device], FOUR, parse_visible_devices("2", FOUR))
    assert rows[0] == row(2, 0, "2")
    assert len(rows) == 4


@pytest.mark.parametrize(("value", "same"), [("3,1", True), ("1,3", False), ("3", False), (None, False), ("", False)])
def test_shows_what_the_variable_asks_for(value, same):
    assert shows(seen_by_torch(3, 1), FOUR, parse_visible_devices(value, FOUR)) is same


class FakeCuda:
    """torch.cuda with two GPUs, the second of which gives nobody a context."""

    def __init__(self, failure: str | None = None) -> None:
        self.failure = failure
        self.asked_for_memory: list[int] = []

    def init(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> SimpleNamespace:
        address = {"pci_domain_id": 0, "pci_bus_id": 10 + index, "pci_device_id": 0}
        return SimpleNamespace(uuid=f"uuid-{index}", name="T4", total_memory=16 * GIB, **address)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.asked_for_memory.append(index)
        if index == 1:
            raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")
        return 15 * GIB, 16 * GIB


@pytest.fixture
def fake_torch(monkeypatch):
    def install(cuda: FakeCuda, version: str | None = "13.2") -> FakeCuda:
        module = SimpleNamespace(version=SimpleNamespace(cuda=version, hip=None), cuda=cuda)
        monkeypatch.setitem(sys.modules, "torch", module)
        return cuda

    return install


def test_torch_devices_with_their_free_memory(fake_torch):
    fake_torch(FakeCuda())
    first = TorchDevice(0, "uuid-0", "0000:0a:00.0", "T4", 16 * GIB, 15 * GIB)
    second = TorchDevice(1, "uuid-1", "0000:0b:00.0", "T4", 16 * GIB, None)
    assert read_torch_devices(want_free_memory=True) == TorchReading((first, second))


def test_no_context_is_made_when_nvml_knows_the_memory(fake_torch):
    cuda = fake_torch(FakeCuda())
    devices = read_torch_devices(want_free_memory=False).devices
    assert [device.memory_free for device in devices] == [None, None]
    assert cuda.asked_for_memory == []


def test_the_reason_is_the_first_sentence_of_torch(fake_torch):
    fake_torch(FakeCuda("The NVIDIA driver is too old (found version 12020). Please update\nyour driver"))
    assert read_torch_devices(True) == TorchReading(reason="The NVIDIA driver is too old (found version 12020)")


def test_a_cpu_only_build_is_not_asked(fake_torch):
    fake_torch(FakeCuda("must not be called"), version=None)
    assert read_torch_devices(True) == TorchReading(reason="this torch is a CPU-only build")
