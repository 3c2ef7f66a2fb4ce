"""The reader of NVML, on a fake pynvml: what it says, and the reason kept when it says nothing."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from fakes.nvml import FakeNvml, gpu, instance

from mgpu_core.tools.doctor.nvml import NvmlReading, pci_address, read_physical_devices

MACHINE = [gpu(0), gpu(1, mig=(instance(0), instance(1))), gpu(2, "NVIDIA T4"), gpu(3, mig=())]


@pytest.fixture
def installed(monkeypatch):
    def install(**options) -> FakeNvml:
        fake = FakeNvml(**options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


@pytest.mark.parametrize("as_bytes", [False, True])
def test_reads_every_gpu_and_its_instances(installed, as_bytes):
    fake = installed(gpus=MACHINE, as_bytes=as_bytes)
    assert read_physical_devices() == NvmlReading(tuple(MACHINE), "580.65.06")
    assert fake.open_sessions == 0


def test_a_lost_gpu_is_a_problem_and_the_others_stay(installed):
    fake = installed(gpus=MACHINE, lost=[2])
    reading = read_physical_devices()
    assert reading.devices == (MACHINE[0], MACHINE[1], MACHINE[3])
    assert reading.problems == ("GPU 2 does not answer: GPU is lost",)
    assert fake.open_sessions == 0


def test_memory_that_the_driver_does_not_tell_is_none(installed):
    installed(gpus=MACHINE[:1], memory_known=False)
    reading = read_physical_devices()
    assert reading.devices == (dataclasses.replace(MACHINE[0], memory_total=None, memory_free=None),)


def test_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reading = read_physical_devices()
    assert reading.devices is None
    assert reading.reason is not None
    assert reading.reason == "nvidia-ml-py is not installed (pip install 'mgpu-core[doctor]')"


def test_no_driver(installed):
    fake = installed(starts=False)
    assert read_physical_devices() == NvmlReading(reason="Driver Not Loaded")
    assert fake.open_sessions == 0


def test_a_failure_after_the_start_is_a_reason_and_closes_the_session(installed, monkeypatch):
    fake = installed(gpus=MACHINE)

    def fail() -> int:
        raise fake.NVMLError("Unknown Error")

    monkeypatch.setattr(fake, "nvmlDeviceGetCount", fail)
    assert read_physical_devices() == NvmlReading(reason="Unknown Error")
    assert fake.open_sessions == 0


@pytest.mark.parametrize("text", ["00000000:0A:00.0", "0000:0a:00.0", "0000:0A:00.0"])
def test_one_spelling_of_pci_addresses(text):
    assert pci_address(text) == "0000:0a:00.0"


def test_a_long_pci_domain_stays_whole():
    assert pci_address("00010000:0A:00.0") == "10000:0a:00.0"
