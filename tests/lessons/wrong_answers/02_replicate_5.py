# Exercise 3 is wrong: buffers are forgotten, so the ranks' BatchNorm keeps old statistics.
# The checker says: refresh(1 replicas, net), rank 0: ['1.running_mean']: expected float32 tensor [9.0, 9.0]

from collections.abc import Sequence

import torch


@torch.no_grad()
def refresh(replicas: Sequence[torch.nn.Module], net: torch.nn.Module) -> None:
    for replica in replicas:
        for mine, value in zip(replica.parameters(), net.parameters(), strict=True):
            mine.copy_(value)
