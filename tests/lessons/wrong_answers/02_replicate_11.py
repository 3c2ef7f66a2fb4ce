# Exercise 3 is wrong: every replica gets new tensors, so whoever holds an old one never sees the new values.
# The checker says: refresh(1 replicas, net), rank 0, tensors that were held before: ['0.weight']: expected

from collections.abc import Sequence

import torch


def refresh(replicas: Sequence[torch.nn.Module], net: torch.nn.Module) -> None:
    values = [*net.parameters(), *net.buffers()]
    for replica in replicas:
        for mine, value in zip([*replica.parameters(), *replica.buffers()], values, strict=True):
            mine.data = value.detach().clone()
