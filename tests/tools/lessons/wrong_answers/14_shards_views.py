# Exercise 1 is wrong: the parts are views, so each keeps the memory of all.
# The checker says: 2), the bytes behind each part: expected [20, 20], got [40, 40]

import torch


def cut(tensors: list, devices: int) -> list[torch.Tensor]:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    size = -(-len(flat) // devices)
    return list(torch.nn.functional.pad(flat, (0, size * devices - len(flat))).split(size))
