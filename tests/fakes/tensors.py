"""Small tensors for the tests, and where tensors are."""

import torch


def numbers(*shape, device=None):
    """Return small whole numbers on the device, or on the default one; neighbouring rows differ."""
    return (torch.arange(torch.Size(shape).numel(), device=device).reshape(shape) % 11 - 4).float()


def devices_of(tensors):
    """Return the names of the tensors' devices, in order."""
    return [str(tensor.device) for tensor in tensors]


def gradients(net):
    """Return the gradient of each parameter by name, as lists."""
    return {name: None if p.grad is None else p.grad.tolist() for name, p in net.named_parameters()}
