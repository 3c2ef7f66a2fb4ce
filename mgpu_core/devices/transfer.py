"""Copies between devices: which way they take, which stream they are on, and who waits for whom.

A batch that is copied while the one before it is computed::

    current stream    [made x] ────── [computes with the batch before] ──────── [computes with the copy of x] ──
                          │ lend                                                   │ hand_over
    side stream           └───────── [copies x] ───────────────────────────────────┘

The side stream waits for whoever made the tensor, and whoever computes with the copy waits for the side stream.  The
allocator is told of both, so that it gives no memory away that the other stream still reads or writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch.nn import Module

from mgpu_core.devices import streams
from mgpu_core.devices.streams import on, own_stream, reach_each_other

__all__ = [
    "copied_so_far",
    "copy_aside",
    "copy_into",
    "copying_to",
    "hand_over",
    "lend",
    "module_to",
    "to_device",
    "used_here",
]


def to_device(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None, *, copy: bool = False
) -> torch.Tensor:
    """Return the tensor on a device, in a dtype; without ``copy`` itself where it is so already.  Differentiable.

    The copy is ordered with the current streams of both devices.  The host waits for copies to the CPU alone, and
    between GPUs that cannot reach each other's memory, whose copies go by way of the host.
    """
    if not reach_each_other(tensor.device, device):
        tensor = tensor.cpu()
    return tensor.to(device, dtype, non_blocking=device.type != "cpu", copy=copy)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, ordered and sent as :func:`to_device` says."""
    if not reach_each_other(source.device, target.device):
        source = source.cpu()
    target.copy_(source, non_blocking=target.device.type != "cpu")


def module_to(module: Module, device: torch.device) -> Module:
    """Return ``module.to(device)``; from GPUs that cannot reach the device, by way of the host."""
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    if not all(reach_each_other(each, device) for each in devices):
        module.cpu()
    return module.to(device)


@contextmanager
def copying_to(devices: Sequence[torch.device]) -> Iterator[None]:
    """Make a side stream the current one of each GPU, so that copies do not queue after its computing.

    Call :func:`lend` before on tensors of a GPU that are read inside.  Memory that is allocated inside belongs to the
    side streams: call :func:`hand_over` before computing with it.  Other devices keep their streams.
    """
    gpus = sorted({device.index for device in devices if device.type == streams.GPU_TYPE})
    with ExitStack() as stack:
        for gpu in gpus:
            stack.enter_context(on(torch.device(streams.GPU_TYPE, gpu), own_stream("copies", gpu)))
        yield


def lend(tensors: Sequence[torch.Tensor]) -> None:
    """Let the side streams read tensors that the current streams have made; call it before :func:`copying_to`."""
    for tensor in tensors:
        if tensor.device.type == streams.GPU_TYPE:
            side = own_stream("copies", tensor.device.index)
            side.wait_stream(torch.accelerator.current_stream(tensor.device))
            tensor.record_stream(side)


def hand_over(tensors: Sequence[torch.Tensor], copied: torch.Event | None = None) -> None:
    """Let the current streams compute with tensors that were made inside :func:`copying_to`.

    Args:
        tensors: the tensors.
        copied: of :func:`copied_so_far`; ``None``: the streams wait for all copies that have been started by now.
    """
    for tensor in tensors:
        if tensor.device.type == streams.GPU_TYPE:
            current = torch.accelerator.current_stream(tensor.device)
            if copied is None:
                current.wait_stream(own_stream("copies", tensor.device.index))
            else:
                current.wait_event(copied)
            tensor.record_stream(current)


def copied_so_far(device: torch.device) -> torch.Event | None:
    """Return an event after the copies to a GPU that have been started; ``None`` on other devices."""
    return own_stream("copies", device.index).record_event() if device.type == streams.GPU_TYPE else None


def used_here(tensors: Sequence[torch.Tensor]) -> None:
    """Let the allocator wait for the current streams before it gives away tensors that other streams have made.

    For tensors that are computed already: the current streams do not wait for those others.
    """
    for tensor in tensors:
        if tensor.device.type == streams.GPU_TYPE:
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def copy_aside(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start a copy of a tensor to another device, on the side streams of both where they are GPUs.

    The copy waits for this thread's current stream of the tensor's device, and the device goes on meanwhile.  Call
    :func:`hand_over` on the result before computing with it.  A tensor that is there already is returned.
    """
    if tensor.device == device:
        return tensor
    lend([tensor])
    with copying_to((tensor.device, device)):
        return to_device(tensor, device)
