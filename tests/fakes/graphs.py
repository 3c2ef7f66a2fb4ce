"""A recorder of steps that has no GPU.

A real recording computes nothing; this one computes and puts everything back, and a replay computes again.
"""

import traceback
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_core.kernels import reference

__all__ = ["Recorder", "without_gpu"]


class Recorder:
    """Of one step; keeps the devices that it has recorded, in order."""

    def __init__(self, step):
        self.step, self.devices = step, []

    @property
    def records(self):
        return len(self.devices)

    def record(self, device, work):
        self.devices.append(device)
        kept = [(each, each.clone()) for each in self._memory()]
        try:
            with OnOneDevice(device) if device.type != "cpu" else nullcontext():  # the host may wait for itself
                results = work()
        finally:
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)
        statics = [torch.full_like(each, float("nan")) for each in results]
        assert all(each.device == device for each in statics)
        return Replay(work, statics), statics

    def _memory(self):
        """What a step writes: parameters and buffers, tables and states, on all devices."""
        for row, module in zip(self.step._replicas.parameters, self.step._replicas.modules, strict=True):
            yield from (each.data for each in row)
            yield from module.buffers()
        for device in self.step._updates._update._devices:
            yield from device.segments
            yield device.held_back
            yield from (each for flats in device.states.values() for each in flats)


class OnOneDevice(TorchDispatchMode):
    """What a graph can hold: the work of one device, that nobody waits for."""

    mgpu_core_thread_safe = True

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        waits = func is torch.ops.aten._local_scalar_dense.default
        tensors = [each for each in tree_leaves((args, kwargs, found)) if isinstance(each, torch.Tensor)]
        if waits or any(each.device != self.device for each in tensors):
            assert by_a_kernel(), f"{func} waits for {self.device}, or leaves it: a graph cannot"
        return found


def by_a_kernel():
    """Whether a kernel's plain reference asks, which stands in for one that looks on the device."""
    return any(frame.f_globals.get("__name__") == reference.__name__ for frame, _ in traceback.walk_stack(None))


class Replay:
    def __init__(self, work, results):
        self.work, self.results = work, results

    def replay(self):
        for static, result in zip(self.results, self.work(), strict=True):
            static.copy_(result)


def without_gpu(step):
    """The step, with a recorder that needs no GPU."""
    step._captured.recorder = Recorder(step)
    return step
