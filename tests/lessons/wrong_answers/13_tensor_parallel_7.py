# Exercise 3 is wrong: it takes all shards to be as large as the first one.
# The checker says: cut_lookup([0, 9, 4, 4, 7, 1], shards of [4, 3, 3] rows)

import torch


def cut_lookup(tokens: torch.Tensor, shards: list) -> list:
    added = []
    for rank, shard in enumerate(shards):
        local = tokens - rank * len(shards[0])
        is_own = (local >= 0) & (local < len(shard))
        added.append(shard[local.clamp(0, len(shard) - 1)] * is_own[:, None])
    return added
