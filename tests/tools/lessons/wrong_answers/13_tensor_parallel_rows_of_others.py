# Exercise 3 is wrong: tokens of other ranks get a row of this rank, which is not cleared.
# The checker says: cut_lookup([0, 9, 4, 4, 7, 1], shards of [5, 5] rows): [0]: expected

import torch


def cut_lookup(tokens: torch.Tensor, shards: list) -> list:
    added, start = [], 0
    for shard in shards:
        added.append(shard[(tokens - start).clamp(0, len(shard) - 1)])
        start += len(shard)
    return added
