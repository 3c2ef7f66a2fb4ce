"""What people write for a device, and what it becomes."""

import pytest
import torch

from mgpu_core.devices import devices
from mgpu_core.devices.devices import as_device, as_devices, default_devices, local_devices


@pytest.mark.parametrize("text", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_cpu_has_no_index(text):
    assert as_device(text) == torch.device("cpu")
    assert as_device(text).index is None


def test_minus_one_is_the_cpu_with_torchs_warning():
    with pytest.warns(FutureWarning, match="Using -1 to represent CPU tensor is deprecated"):
        assert as_device(-1) == torch.device("cpu")


@pytest.mark.parametrize("wrong", ["cpu0", "", "cuda:x", "cuda:-1", -2, 10**6, "cuda:999", "meta", "xpu:3"])
def test_devices_that_do_not_exist(wrong):
    with pytest.raises(ValueError, match=r"is not a device|does not exist|0 or more"):
        as_device(wrong)


@pytest.mark.parametrize("wrong", [None, 1.0, True, ["cpu"]])
def test_things_that_are_no_devices(wrong):
    with pytest.raises(TypeError, match="a device is"):
        as_device(wrong)


def test_lists():
    assert as_devices(["cpu", torch.device("cpu")]) == (torch.device("cpu"),) * 2
    with pytest.raises(ValueError, match="empty"):
        as_devices([])
    with pytest.raises(TypeError, match="one entry per rank"):
        as_devices("cpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the defaults are the accelerators then")
def test_defaults_without_an_accelerator(monkeypatch):
    monkeypatch.delenv("MGPU_CORE_CPU_RANKS", raising=False)
    assert default_devices() == []
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "3")
    assert default_devices() == [torch.device("cpu")] * 3
    for text in ("-1", "two", "1.5"):
        monkeypatch.setenv("MGPU_CORE_CPU_RANKS", text)
        with pytest.raises(ValueError, match="MGPU_CORE_CPU_RANKS must be a whole number"):
            default_devices()


def test_the_devices_of_a_machine_are_dealt_out_to_its_processes(monkeypatch):
    monkeypatch.setattr(devices, "default_devices", lambda: [torch.device("cuda", i) for i in range(5)])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def dealt(process, processes):
        monkeypatch.setenv("LOCAL_RANK", str(process))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        return [device.index for device in local_devices()]

    assert [device.index for device in local_devices()] == [0, 1, 2, 3, 4]
    assert dealt(0, 1) == [0, 1, 2, 3, 4]
    assert [dealt(process, 2) for process in range(2)] == [[0, 1], [2, 3, 4]]
    assert [dealt(process, 5) for process in range(5)] == [[0], [1], [2], [3], [4]]
    with pytest.raises(ValueError, match="5 devices for 6 processes on this machine"):
        dealt(0, 6)
    with pytest.raises(ValueError, match="LOCAL_RANK must be less than LOCAL_WORLD_SIZE, which is 2, not 2"):
        dealt(2, 2)
    with pytest.raises(ValueError, match="LOCAL_RANK must be a whole number"):
        dealt("first", 2)


def test_one_device_is_too_few_for_two_processes(monkeypatch):
    monkeypatch.setattr(devices, "default_devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="1 devices for 2 processes"):
        local_devices()


def test_cpu_ranks_are_each_process_s_own(monkeypatch):
    monkeypatch.setattr(devices, "default_devices", lambda: [torch.device("cpu")] * 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert local_devices() == [torch.device("cpu")] * 2
