# Exercise 2 is wrong: item() gives the right number, without a graph.
# The checker says: the result has no history, so no gradient can come back

from collections.abc import Sequence

import torch


def team_mean(means: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    total = sum(mean.item() * count for mean, count in zip(means, rows, strict=True) if count)
    return torch.tensor(total / sum(rows), dtype=means[0].dtype)
