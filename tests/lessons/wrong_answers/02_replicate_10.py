# Exercise 3 is wrong: "a leaf that requires grad" cannot be written, so it is made none, and autograd records the copy.
# The checker says: refresh(1 replicas, net), rank 0: a parameter is no leaf any more: write under torch.no_grad()

from collections.abc import Sequence

import torch


def refresh(replicas: Sequence[torch.nn.Module], net: torch.nn.Module) -> None:
    for replica in replicas:
        for mine, value in zip(replica.parameters(), net.parameters(), strict=True):
            mine.requires_grad_(False)
            mine.copy_(value)
            mine.requires_grad_(True)
        for mine, value in zip(replica.buffers(), net.buffers(), strict=True):
            mine.copy_(value)
