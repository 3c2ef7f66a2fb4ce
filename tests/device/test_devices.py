"""What people write for a device, and what it becomes."""

import pytest
import torch

from mgpu_core.device.devices import as_device, as_devices, default_devices


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
