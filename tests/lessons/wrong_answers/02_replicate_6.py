# Exercise 3 is wrong: assigning to data makes all ranks share the net's memory.
# The checker says: refresh(1 replicas, net), rank 0, after a later write into the net: ['0.weight']

from collections.abc import Sequence

import torch


def refresh(replicas: Sequence[torch.nn.Module], net: torch.nn.Module) -> None:
    values = [*net.parameters(), *net.buffers()]
    for replica in replicas:
        for mine, value in zip([*replica.parameters(), *replica.buffers()], values, strict=True):
            mine.data = value.data
