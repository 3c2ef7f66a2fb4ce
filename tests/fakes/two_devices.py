"""Build the layers and rows of the tests of what torch expects of its own data parallelism.

Torch tests ``torch.nn.parallel`` and ``torch.cuda.comm`` on two GPUs.  Everything that those tests expect is asked of
ours, in our words: of ranks on the CPU, and of devices that differ in the process of ``fakes/on_the_fake.py``.
Where the contract differs on purpose, the test says so.
"""

import torch
from fakes.nets import cpu, whole
from torch import nn

TEAM = cpu(2)

HOME, OTHER = (torch.device(device) for device in TEAM)


def linear(device=HOME, dtype=torch.float64):
    return whole(nn.Linear(3, 2)).to(device, dtype)


def rows(count=5, device=HOME, dtype=torch.float64, columns=3):
    return (torch.arange(count * columns, device=device) % 7 - 3).view(count, columns).to(dtype)
