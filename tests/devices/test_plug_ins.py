"""What is asked of an accelerator's module, whatever it takes and lacks; the devices themselves are on the fakes."""

from types import SimpleNamespace

import pytest
import torch

from mgpu_core.devices.plug_ins import indices_of, numbers_of, put_numbers_back, total_nbytes

MPS, NPU = torch.device("mps", 0), torch.device("privateuseone", 2)


class Generators:
    """The state of each device, as modules with ``get_rng_state`` and ``set_rng_state`` give it."""

    def __init__(self, *devices):
        self.states = {device: torch.tensor([index], dtype=torch.uint8) for index, device in enumerate(devices)}

    def get(self, device):
        return self.states[device]

    def set(self, state, device):
        self.states[device] = state


@pytest.fixture
def generators(monkeypatch):
    """Two accelerators in a torch before 2.13: one names no device, as Apple's, the other wants one, as CUDA."""
    made = Generators(MPS, NPU)
    modules = {
        "mps": SimpleNamespace(get_rng_state=lambda: made.get(MPS), set_rng_state=lambda state: made.set(state, MPS)),
        "privateuseone": SimpleNamespace(get_rng_state=made.get, set_rng_state=made.set),
    }
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    monkeypatch.delattr(torch.accelerator, "random", raising=False)
    return made


def test_random_numbers_with_and_without_a_device(generators):
    states = numbers_of([torch.device("cpu"), MPS, NPU, MPS, torch.device("meta")])
    assert {device: state.tolist() for device, state in states.items()} == {MPS: [0], NPU: [1]}
    put_numbers_back({NPU: states[MPS], MPS: states[NPU]})
    assert {device: state.tolist() for device, state in generators.states.items()} == {MPS: [1], NPU: [0]}


def test_newer_torch_is_asked_for_the_state_itself(generators, monkeypatch):
    by_torch = SimpleNamespace(get_rng_state=lambda device: torch.tensor([7 + device.index]))
    monkeypatch.setattr(torch.accelerator, "random", by_torch, raising=False)
    assert [state.tolist() for state in numbers_of([MPS, NPU]).values()] == [[7], [9]]


@pytest.mark.parametrize("error", [RuntimeError("no such allocator"), NotImplementedError("not yet")])
def test_memory_that_is_not_told(error, monkeypatch):
    def refuses(device):
        raise error

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuses)
    assert total_nbytes(MPS) is None
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (0, 0))
    assert total_nbytes(MPS) is None
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3, 8))
    assert (total_nbytes(MPS), total_nbytes(torch.device("cpu"))) == (8, None)


def test_the_devices_that_a_process_can_use(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert (list(indices_of("xpu")), list(indices_of("cuda"))) == ([0, 1, 2, 3], [])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="tpu"))
    assert list(indices_of("tpu")) == [3]
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert list(indices_of("tpu")) == []
