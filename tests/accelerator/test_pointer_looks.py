"""How often the core asks the driver whose memory a pointer is: of arrays of other libraries, and of nothing else."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from fakes import accelerator
from torch.optim import SGD

from mgpu_core import TrainStep, _core, comm, kernels

pytestmark = pytest.mark.skipif(not accelerator.by_the_cuda_backend(), reason="needs the core on the fake CUDA runtime")


def looks():
    return ctypes.CDLL(_core.__file__).fakeCudaPointerLooks()


class Many(torch.nn.Module):
    """As many parameters as a ResNet-50."""

    def __init__(self):
        super().__init__()
        self.all = torch.nn.ParameterList(torch.ones(3) for _ in range(161))

    def forward(self, x):
        return x.sum() * sum(each.sum() for each in self.all)


@pytest.mark.parametrize("devices", [["fake:0"], ["fake:0"] * 4, ["fake:0", "fake:1", "fake:2", "fake:3"]])
def test_a_step_asks_nothing(devices):
    net, x = Many(), torch.ones(4, 1)
    step = TrainStep(net, lambda out, y: out.sum(), SGD(net.parameters(), lr=0.5, momentum=0.5), devices, clip_norm=1.0)
    step(x, x)
    before = looks()
    step(x, x)
    assert looks() == before


def test_collectives_and_kernels_trust_tensors():
    tensors = [torch.ones(4, device=f"fake:{device}") for device in range(2)]
    before = looks()
    comm.all_reduce(tensors)
    comm.reduce_add(tensors)
    kernels.pack([tensors[0], tensors[0]], scale=2.0)
    assert looks() == before


def test_an_array_of_another_library_is_looked_at_once(monkeypatch):
    class Array:
        def __dlpack__(self):
            raise AssertionError("the test's own from_dlpack reads it")

    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda array: torch.full((4,), 3.0, device="fake:1"))
    before = looks()
    assert kernels.scale_cast(Array(), 2.0).tolist() == [6.0] * 4
    assert looks() == before + 1


@pytest.mark.parametrize("is_written", [False, True])
def test_an_array_that_its_gpu_does_not_reach_is_refused(monkeypatch, is_written):
    """Another library may say what it likes: the driver knows where the memory is."""
    foreign, ours = torch.zeros(4, device="fake:1"), torch.ones(4, device="fake:1")
    array = SimpleNamespace(__dlpack__=None)

    def check(backend, pointer, device, name):
        assert (backend, pointer, device) == ("cuda", foreign.data_ptr(), 1)
        raise ValueError(f"{name}: the memory must be of device 1, and is ordinary host memory")

    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda array: foreign)
    monkeypatch.setattr(_core, "check_memory", check)
    with pytest.raises(ValueError, match=f"{'out' if is_written else 'tensor'}: the memory must be of device 1"):
        kernels.scale_cast(ours, 2.0, out=array) if is_written else kernels.scale_cast(array, 2.0)
    assert foreign.tolist() == [0.0] * 4
